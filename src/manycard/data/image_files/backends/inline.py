"""One image after another, in the calling thread: what every host-side backend does with a part of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manycard.data.image_files.backends.backend import Backend, DecodedBatch
from manycard.data.image_files.decode import decode, read_file
from manycard.data.image_files.header import BadImage
from manycard.data.image_files.recipe import Recipe, Request

__all__ = ["Inline", "Writer"]


class Writer:
    """Puts single images into a batch.

    Args:
        recipe: what every image becomes.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._scale, self._shift = recipe.scale_and_shift()

    def load(self, request: Request, row: Tensor) -> str | None:
        """Read one file into `row`, ``[3, height, width]``; the reason where it is bad."""
        try:
            image = decode(read_file(request.path), request.seed, self._recipe)
        except BadImage as error:
            return str(error)
        self.write(image, row)
        return None

    def write(self, image: Tensor, row: Tensor) -> None:
        """Put a uint8 image into `row`, normalised unless that is uint8 too."""
        if row.dtype == torch.uint8:
            row.copy_(image)
        elif row.dtype == torch.float32:
            # One image stays in the cache between these; a whole batch would not. Mixed with floats in one operation,
            # bytes take twice as long.
            row.copy_(image).mul_(self._scale).add_(self._shift)
        else:
            row.copy_(image.float().mul_(self._scale).add_(self._shift))


class Inline(Backend):
    """No threads and no processes; for worker processes of a DataLoader, which decode beside one another."""

    name = "inline"

    def load(self, requests: Sequence[Request]) -> DecodedBatch:
        writer, images = Writer(self.recipe), self.make_room(len(requests))
        found = [writer.load(request, row) for request, row in zip(requests, images, strict=True)]
        return DecodedBatch(
            self.hand_out(images), {row: reason for row, reason in enumerate(found) if reason is not None}
        )
