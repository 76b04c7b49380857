"""A small convolutional network on the 1,797 real handwritten digits that scikit-learn ships.

Every fifth image, in a fixed shuffled order, is held out; the rest is trained on for a number of epochs, with an
uneven last batch in each. There is no BatchNorm and no dropout, and every layer is smooth, so that every strategy
computes the same losses up to rounding: with ReLU and max-pooling, a difference of 1e-7 that falls on a kink grew
to 1e-2 in 15 epochs; with GELU and a strided convolution it stays near 1e-6.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from manycard.benchmark.workloads.workload import Feeding, Workload
from manycard.errors import MissingExtraError

if TYPE_CHECKING:
    from manycard.parallel import Parallel

__all__ = ["Digits", "DigitsNet"]


class DigitsNet(nn.Module):
    """Two convolutions and a linear layer; ``(n, 1, 8, 8) -> (n, 10)``."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(2 * width * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))  # type: ignore[no-any-return]


class Digits(Workload):
    """Real data, trained to over 95 % of the held-out images."""

    name = "digits"
    unit = "images"
    per_card_batch = 64
    small_per_card_batch = 64
    length_unit = "epochs"
    default_length = 20

    @classmethod
    def check_available(cls) -> None:
        if importlib.util.find_spec("sklearn") is None:
            raise MissingExtraError("scikit-learn", "demo", f"the workload {cls.name}")

    @cached_property
    def _split(self) -> tuple[TensorDataset, TensorDataset]:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        x = torch.from_numpy(images).float().div(16).view(-1, 1, 8, 8)[order]
        y = torch.from_numpy(labels).long()[order]
        held_out = torch.arange(len(y)) % 5 == 0
        return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])

    @property
    def train_set(self) -> TensorDataset:
        """1,437 pairs of an image ``(1, 8, 8)`` in 0 to 1, and its digit."""
        return self._split[0]

    @property
    def test_set(self) -> TensorDataset:
        """The 360 pairs that are never trained on."""
        return self._split[1]

    def make_model(self) -> nn.Module:
        return DigitsNet(width=8 if self.small else 32)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=2e-3)

    def loss(self, model: Any, batch: Any) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def total_steps(self, feeding: Feeding) -> int | None:
        return feeding.length * math.ceil(len(self.train_set) / feeding.batch)

    def batches(self, parallel: Parallel, feeding: Feeding) -> Iterator[tuple[Any, int]]:
        samples = len(self.train_set)
        loader = parallel.loader(self.train_set, batch_size=feeding.batch, shuffle=True)
        for _ in range(feeding.length):
            for number, batch in enumerate(loader):
                yield batch, min(feeding.batch, samples - number * feeding.batch)

    def accuracy(self, parallel: Parallel, model: nn.Module, feeding: Feeding) -> float | None:
        def right(model: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
            images, labels = batch
            return {"accuracy": ((model(images).argmax(1) == labels).sum(), len(labels))}

        loader = parallel.loader(self.test_set, batch_size=feeding.batch)
        return float(parallel.evaluate(right, model, loader)["accuracy"])
