"""A view of the stored image, turned, is the view of the upright image: exactly, for every orientation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from manycard.data.image_files.decode import turn
from manycard.data.image_files.view import Box, View

UPRIGHT_TO_STORED = {
    1: lambda image: image,
    2: lambda image: image.flip(-1),
    3: lambda image: image.flip(-1, -2),
    4: lambda image: image.flip(-2),
    5: lambda image: image.transpose(-1, -2),
    6: lambda image: image.rot90(1, (-2, -1)),
    7: lambda image: image.transpose(-1, -2).flip(-1, -2),
    8: lambda image: image.rot90(-1, (-2, -1)),
}


def look(image: Tensor, view: View) -> Tensor:
    """A view without resizing."""
    box, (top, left), (height, width) = view.box, view.inside, view.size
    part = image[:, box.top : box.top + box.height, box.left : box.left + box.width]
    assert tuple(part.shape[1:]) == view.resized
    return turn(part[:, top : top + height, left : left + width], view)


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_same_pixels_as_upright(orientation: int, mirrored: bool) -> None:
    upright = torch.arange(3 * 9 * 14).view(3, 9, 14)
    view = View(Box(2, 1, 10, 7), (7, 10), (2, 3), (4, 5), mirrored=mirrored)
    expected = look(upright, view)
    stored = UPRIGHT_TO_STORED[orientation](upright)
    assert torch.equal(look(stored, view.in_stored(orientation, 14, 9)), expected)
