"""The same training alone, in plain PyTorch, and spread over simulated cards by `dp`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manycard as mc

__all__ = ["Both", "Make", "close", "mse", "rows"]

Make = Callable[..., "mc.Parallel"]


def rows(samples: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """A batch of fp64 features and targets."""
    x = torch.randn(samples, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :3].sin()


def mse(model: Any, batch: Any) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(model(batch[0]), batch[1])


class Both:
    """The same training alone, in plain PyTorch, and spread over cards."""

    def __init__(self, make: Make, make_model: Callable[[], nn.Module], loss_fn: Any = mse, **options: Any) -> None:
        torch.manual_seed(0)
        self.alone = make_model().double()
        torch.manual_seed(0)
        self.module = make_model().double()
        self.loss_fn = loss_fn
        self.parallel = make()
        self.mine = torch.optim.SGD(self.alone.parameters(), lr=0.1, momentum=0.9)
        self.model, self.theirs = self.parallel.setup(
            self.module, torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        )
        self.step = self.parallel.train_step(loss_fn, self.model, self.theirs, **options)

    def train(self, batch: Any) -> None:
        """One step of both; the losses must agree."""
        self.mine.zero_grad()
        loss = self.loss_fn(self.alone, batch)
        loss.backward()
        self.mine.step()
        close(self.step(batch), loss.detach(), "the loss")

    def check(self) -> None:
        """Parameters and buffers must agree, and the replicas with each other."""
        self.parallel.check_lockstep(self.model)
        for (name, mine), (other, theirs) in zip(
            self.alone.state_dict().items(), self.module.state_dict().items(), strict=True
        ):
            assert name == other
            close(theirs, mine, name)


def close(actual: Any, expected: Any, name: str) -> None:
    """Equal to 1e-9."""
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=lambda text: f"{name}: {text}")
