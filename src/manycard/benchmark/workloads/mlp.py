"""A deep, narrow perceptron: hardly any arithmetic, so that overhead is what is measured."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manycard.benchmark.workloads.synthetic import SyntheticWorkload

__all__ = ["MLP"]


class MLP(SyntheticWorkload):
    """12 linear layers of width 1,024; 11.6 M parameters."""

    name = "mlp"
    unit = "samples"
    per_card_batch = 256
    layers = 12
    classes = 10

    @property
    def width(self) -> int:
        """Features between layers."""
        return 32 if self.small else 1024

    def make_model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for _ in range(self.layers - 1):
            layers += [nn.Linear(self.width, self.width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(self.width, self.classes))

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def draw(self, samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(samples, self.width, generator=generator)
        return inputs, torch.randint(self.classes, (samples,), generator=generator)

    def loss(self, model: Any, batch: Any) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels)
