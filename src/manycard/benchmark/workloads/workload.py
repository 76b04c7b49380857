"""The contract of a workload: a model, its data and its loss, made the same way for every strategy.

Behaviour every workload keeps:
    * The same seed gives the same initial weights and the same global batches, whatever the strategy and however
      many cards there are. Losses of two rows with the same global batch can therefore be compared step by step.
    * Nothing is downloaded. Data is synthetic, or comes with an installed package.
    * `small=True` is the same kind of training at a size that a CPU does in seconds.
    * A workload that needs a package which isn't installed says so in `check_available`, before any row runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from manycard.parallel import Parallel

__all__ = ["Feeding", "Workload"]


@dataclass(frozen=True)
class Feeding:
    """How much data one row gets, and from which random state."""

    batch: int
    """Samples in a global batch."""
    length: int
    """Epochs, for workloads that are measured in epochs; others go on for as long as they are asked to."""
    seed: int
    """Decides the order of real samples, and the values of synthetic ones."""


class Workload(ABC):
    """One kind of training that rows of a benchmark run.

    Args:
        small: a size that a CPU trains in seconds.
        channels_last: image models and batches in ``torch.channels_last``; no effect where there are no images.
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    """What one sample is, in the plural: ``images``, ``sequences``, ``samples``."""
    per_card_batch: ClassVar[int]
    """The default, in weak scaling."""
    small_per_card_batch: ClassVar[int] = 8
    """The default of the small variant."""
    length_unit: ClassVar[str] = "steps"
    default_length: ClassVar[int] = 20
    """Epochs where the caller doesn't say; without meaning for workloads in steps, which run until they are steady."""
    has_images: ClassVar[bool] = False
    loss_note: ClassVar[str] = ""
    """Why losses on several cards may differ from one card's by more than rounding; empty where they may not."""

    def __init__(self, *, small: bool = False, channels_last: bool = True) -> None:
        self.small = small
        self.channels_last = channels_last

    @classmethod
    def check_available(cls) -> None:
        """Raise `MissingExtraError` when a package that the workload needs is not installed."""

    @property
    def default_batch(self) -> int:
        """Samples a card where the caller doesn't say."""
        return self.small_per_card_batch if self.small else self.per_card_batch

    @abstractmethod
    def make_model(self) -> nn.Module:
        """The model, on the CPU, with weights drawn from torch's global random state."""

    @abstractmethod
    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer of `model`."""

    @abstractmethod
    def loss(self, model: Any, batch: Any) -> Tensor:
        """The mean loss over the samples of `batch`; 0-dim."""

    def total_steps(self, feeding: Feeding) -> int | None:
        """Steps that there are; None where there are as many as are asked for."""
        return None

    @abstractmethod
    def batches(self, parallel: Parallel, feeding: Feeding) -> Iterator[tuple[Any, int]]:
        """This process's part of each global batch, with the number of samples in the global batch."""

    def accuracy(self, parallel: Parallel, model: nn.Module, feeding: Feeding) -> float | None:
        """The share of held-out samples that the trained model gets right; None where nothing is held out."""
        return None
