"""The contract of a backend: files and seeds in, a batch of images out.

Behaviour every backend keeps:
    * The view of a sample follows from its seed (`manycard.data.image_files.augment`), so backends differ by their
      decoders and filters only: on photographs, by about one of 255 levels on average.
    * A bad file does not end the batch: its row holds nothing of use, and `DecodedBatch.bad` says why.
    * Threads, processes and pipelines are made when the first batch is asked for, and end with `close` or with the
      backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from manycard.data.image_files.recipe import Recipe, Request

__all__ = ["Backend", "DecodedBatch"]


@dataclass(frozen=True)
class DecodedBatch:
    """What became of the files that were asked for."""

    images: Tensor
    """``[files, 3, height, width]`` in the recipe's dtype, on the host or on a card."""
    bad: dict[int, str] = field(default_factory=dict)
    """The rows whose files are no images, and why."""


class Backend(ABC):
    """Turns files into batches.

    Args:
        recipe: what every image becomes.
        workers: how many images are decoded at once on the host.
        device: a card on which a batch that was decoded on the host is normalised; None leaves it on the host. Bytes
            travel then, a quarter of what fp32 would be.
    """

    name: ClassVar[str]
    extra: ClassVar[str] = "vision"
    """The extra of manycard that brings what this backend needs."""

    def __init__(self, recipe: Recipe, workers: int, device: torch.device | None = None) -> None:
        self.recipe = recipe
        self.workers = workers
        self.device = device

    @classmethod
    def missing(cls) -> str | None:
        """What this backend needs and is not here; None where it can work."""
        return None

    def make_room(self, images: int) -> Tensor:
        """Room for a batch on the host."""
        if self.device is None:
            return self.recipe.empty(images)
        shape = (images, 3, *self.recipe.size)
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def hand_out(self, images: Tensor) -> Tensor:
        """What `make_room` gave and was filled since, as the recipe wants it."""
        if self.device is None:
            return images
        images = images.to(self.device, non_blocking=True)
        if self.recipe.dtype == torch.uint8:
            return images
        scale, shift = self.recipe.scale_and_shift(self.device)
        return images.float().mul_(scale).add_(shift).to(self.recipe.dtype)

    def begin(self, requests: Sequence[Request]) -> Any:
        """Start what of a batch can be done ahead of `finish`, and don't wait for it."""
        return requests

    def finish(self, begun: Any) -> DecodedBatch:
        """The batch for which `begin` gave `begun`."""
        return self.load(begun)

    @abstractmethod
    def load(self, requests: Sequence[Request]) -> DecodedBatch:
        """Read, decode, augment and normalise one batch."""

    def close(self) -> None:
        """End threads, processes and pipelines; `load` makes them anew."""
