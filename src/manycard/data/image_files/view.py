"""The part of an image that a sample shows, and how the image is stored.

A `View` says in numbers what augmentation does to one image: cut `box` out of it, resize that to `resized`, cut the
window `size` at `inside` out of the result, turn it, mirror it. Every backend is given views and draws nothing itself,
so that they can differ by their decoders only.

Cameras store images lying on their side and say so in the EXIF tag *orientation*. A view is drawn on the upright image
and carried over to the stored one, so that decoders can cut what they decode and only the small result is turned.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Box", "View"]

_TURNS = {
    1: (False, False, False),
    2: (False, True, False),
    3: (False, True, True),
    4: (False, False, True),
    5: (True, False, False),
    6: (True, True, False),
    7: (True, True, True),
    8: (True, False, True),
}
"""For each EXIF orientation: stored to upright is a transposition or none, then mirroring each row, each column."""


class Box(NamedTuple):
    """A rectangle of pixels."""

    left: int
    top: int
    width: int
    height: int


class View(NamedTuple):
    """What becomes of one image, in this order."""

    box: Box
    """Cut out of the image."""
    resized: tuple[int, int]
    """Height and width to which the box is resized, with a triangle filter as wide as the reduction (antialiasing)."""
    inside: tuple[int, int]
    """Top and left of the window in the resized box."""
    size: tuple[int, int]
    """Height and width of the window."""
    transposed: bool = False
    """Whether rows become columns."""
    mirrored: bool = False
    """Whether each row is then reversed."""
    flipped: bool = False
    """Whether each column is then reversed."""

    def in_stored(self, orientation: int, width: int, height: int) -> View:
        """The same view of the image as it is stored.

        Args:
            orientation: the EXIF tag, 1 to 8.
            width: of the upright image.
            height: of the upright image.
        """
        if orientation == 1:
            return self
        transposed, mirrored, flipped = _TURNS[orientation]
        left, top, box_width, box_height = self.box
        (high, wide), (down, across), (rows, columns) = self.resized, self.inside, self.size
        if mirrored:
            left, across = width - left - box_width, wide - across - columns
        if flipped:
            top, down = height - top - box_height, high - down - rows
        if transposed:
            left, top, box_width, box_height = top, left, box_height, box_width
            high, wide, down, across, rows, columns = wide, high, across, down, columns, rows
        return View(
            Box(left, top, box_width, box_height),
            (high, wide),
            (down, across),
            (rows, columns),
            transposed,
            mirrored != self.mirrored,
            flipped,
        )
