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
from typing import ClassVar

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
    """

    name: ClassVar[str]
    extra: ClassVar[str] = "vision"
    """The extra of manycard that brings what this backend needs."""

    def __init__(self, recipe: Recipe, workers: int) -> None:
        self.recipe = recipe
        self.workers = workers

    @classmethod
    def missing(cls) -> str | None:
        """What this backend needs and is not here; None where it can work."""
        return None

    @abstractmethod
    def load(self, requests: Sequence[Request]) -> DecodedBatch:
        """Read, decode, augment and normalise one batch."""

    def close(self) -> None:
        """End threads, processes and pipelines; `load` makes them anew."""
