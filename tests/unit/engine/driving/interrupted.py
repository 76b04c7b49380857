"""A script that is interrupted in the middle of a step: its arguments say of what, and how often."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

import manycard as mc


class Interrupts(torch.autograd.Function):
    """Presses Ctrl-C in backward, and takes longer than the main thread needs to end."""

    presses = 0
    """How often Ctrl-C is still to be pressed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        for _ in range(Interrupts.presses):
            Interrupts.presses -= 1
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.0)
        return gradients[0]


class Layer(nn.Linear):
    """A layer whose backward pass is interrupted."""

    def forward(self, x: Tensor) -> Tensor:
        return Interrupts.apply(super().forward(x))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def main(kind: str, presses: int) -> None:
    """Train, and be interrupted; what trains is gone when the process ends."""
    model = nn.Sequential(nn.Linear(4, 4), Layer(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "pipeline":
        step = mc.Pipeline(model, "cpu:2", stages=["1"], micro_batches=1).train_step(loss_fn, optimizer)
    else:
        parallel = mc.Parallel("dp", cards="cpu:2")
        step = parallel.train_step(loss_fn, *parallel.setup(model, optimizer))
    step(torch.ones(4, 4))
    Interrupts.presses = presses
    step(torch.ones(4, 4))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
