"""What every image of a dataset becomes: its size, its augmentation, its numbers. Configuration, checked where made."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from manycard.data.image_files.augment import Augment, CentreCrop, RandomResizedCrop
from manycard.errors import SettingError

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "Recipe", "Request", "make_recipe"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_DTYPES = (torch.uint8, torch.float32, torch.float16, torch.bfloat16)


class Request(NamedTuple):
    """One image that is asked for."""

    path: str
    seed: int
    """What its view is drawn from."""


@dataclass(frozen=True)
class Recipe:
    """What a file becomes: a tensor ``[3, height, width]``, red, green and blue."""

    size: tuple[int, int]
    """Height and width."""
    augment: Augment
    """Chooses the view."""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    """Taken from each channel, whose values are from 0 to 1."""
    std: tuple[float, float, float] = IMAGENET_STD
    """What the difference is divided by."""
    dtype: torch.dtype = torch.float32
    """uint8 leaves values from 0 to 255, not normalised: a quarter of the bytes, where the model does the rest."""

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            names = ", ".join(str(dtype) for dtype in _DTYPES)
            raise SettingError("dtype", self.dtype, "images can't be made in it", fix=f"give one of {names}")
        if any(value <= 0 for value in self.std):
            raise SettingError("std", self.std, "it is divided by, so it must be above 0")

    def scale_and_shift(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """What bytes are multiplied by and what is added then to normalise them: two tensors ``[3, 1, 1]``."""
        return _scale_and_shift(self.mean, self.std, torch.device(device))

    def empty(self, images: int) -> Tensor:
        """Room for a batch, on the host.

        Made by NumPy, which asks for huge pages: writing to fresh memory of PyTorch's takes 370 us an image of
        224 x 224 in fp32, of NumPy's 67 (AMD EPYC, Linux 6).
        """
        shape, width = (images, 3, *self.size), self.dtype.itemsize
        return torch.from_numpy(np.empty(shape, dtype=f"i{width}" if width > 1 else "u1")).view(self.dtype)


@functools.cache
def _scale_and_shift(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    # Kept, since sending numbers to a card waits for all that it was given before.
    deviation = torch.tensor(std, device=device).view(3, 1, 1)
    return 1 / (255 * deviation), -torch.tensor(mean, device=device).view(3, 1, 1) / deviation


def make_recipe(
    size: int | tuple[int, int],
    augment: Augment | bool,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype,
) -> Recipe:
    """Read what a user gave.

    Raises:
        SettingError: a setting has a value that can't work.
    """
    sides = size if isinstance(size, tuple | list) else (size, size)
    try:
        height, width = (operator.index(side) for side in sides)
    except (TypeError, ValueError):
        height = width = 0
    if height < 1 or width < 1:
        raise SettingError("size", size, "it is no size in pixels", fix="give size=224, or (height, width)")
    if not isinstance(augment, Augment | bool):
        raise SettingError(
            "augment", augment, "it is no augmentation", fix="give True, False, RandomResizedCrop() or CentreCrop()"
        )
    if isinstance(augment, bool):
        augment = RandomResizedCrop() if augment else CentreCrop()
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != 3:
            raise SettingError(name, values, "it needs one value for each of red, green and blue")
    red, green, blue = (float(value) for value in mean)
    red_by, green_by, blue_by = (float(value) for value in std)
    return Recipe((height, width), augment, (red, green, blue), (red_by, green_by, blue_by), dtype)
