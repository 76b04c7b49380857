"""Augmentation: which view of an image a sample shows.

Behaviour:
    * A view is a function of the sample's seed and the image's upright size; no backend, worker or card changes it.
    * The distributions are those of torchvision's transforms of the same names.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass

from manycard.data.image_files.view import Box, View
from manycard.errors import SettingError

__all__ = ["Augment", "CentreCrop", "RandomResizedCrop"]

_TRIES = 10


class Augment(ABC):
    """Chooses views."""

    @abstractmethod
    def view(self, seed: int, width: int, height: int, size: tuple[int, int]) -> View:
        """The view of one sample.

        Args:
            seed: 64 bits that belong to the sample and the epoch.
            width: of the upright image.
            height: of the upright image.
            size: height and width of what is shown.
        """


@dataclass(frozen=True)
class RandomResizedCrop(Augment):
    """A random part of the image, resized, and mirrored half the time; what ImageNet is trained with.

    Source: Szegedy et al., arXiv:1409.4842; torchvision.transforms.RandomResizedCrop.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest share of the image's area."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest width / height of the part."""
    mirror: float = 0.5
    """How often the view is mirrored, from 0 to 1."""

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise SettingError("scale", self.scale, "shares of the area lie in (0, 1], the smaller first")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise SettingError("ratio", self.ratio, "ratios are above 0, the smaller first")
        if not 0 <= self.mirror <= 1:
            raise SettingError("mirror", self.mirror, "it is a share from 0 to 1", fix="leave it out for 0.5")

    def view(self, seed: int, width: int, height: int, size: tuple[int, int]) -> View:
        draw = random.Random(seed)
        box = self._box(draw, width, height)
        return View(box, size, (0, 0), size, mirrored=draw.random() < self.mirror)

    def _box(self, draw: random.Random, width: int, height: int) -> Box:
        # Plain arithmetic on random(): uniform() and randint() would take half as long again.
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        smallest, largest = self.scale
        for _ in range(_TRIES):
            area = width * height * (smallest + (largest - smallest) * draw.random())
            ratio = math.exp(low + (high - low) * draw.random())
            wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < wide <= width and 0 < tall <= height:
                left, top = int(draw.random() * (width - wide + 1)), int(draw.random() * (height - tall + 1))
                return Box(left, top, wide, tall)
        # The middle of the image, as large as the ratios allow.
        wide = min(width, max(1, round(height * self.ratio[1])))
        tall = min(height, max(1, round(width / self.ratio[0])))
        return Box((width - wide) // 2, (height - tall) // 2, wide, tall)


@dataclass(frozen=True)
class CentreCrop(Augment):
    """The middle of the image after its shorter side was resized; draws nothing. For evaluation."""

    resize: int | None = None
    """The shorter side, in pixels; without it 8/7 of the larger side of what is shown (256 for 224)."""

    def view(self, seed: int, width: int, height: int, size: tuple[int, int]) -> View:
        short = max(self.resize or round(max(size) * 8 / 7), *size)
        if width <= height:
            wide, tall = short, max(short, int(short * height / width))
        else:
            wide, tall = max(short, int(short * width / height)), short
        inside = (round((tall - size[0]) / 2), round((wide - size[1]) / 2))
        return View(Box(0, 0, width, height), (tall, wide), inside, size)
