"""A hang in a stage of a pipeline, and what only takes long there; what became of each is printed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import manycard as mc
from manycard.errors import HangError
from manycard.hangs import PULSE

plan = SimpleNamespace(forward=0.0, backward=0.0, checkpoint=0.0)


class Stands(torch.autograd.Function):
    """Does nothing, and in backward takes as long as the plan says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(plan.backward)
        return gradients[0]


class Stage(nn.Module):
    """A stage that may stand."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(plan.forward)
        return Stands.apply(self.layer(x))

    def get_extra_state(self) -> int:
        return self._state("saved")

    def set_extra_state(self, state: int) -> None:
        self._state("loaded")

    def _state(self, how: str) -> int:
        print(f"{how} in {PULSE.activity!r}", file=sys.stderr, flush=True)
        time.sleep(plan.checkpoint)
        return 0


def in_forward() -> None:
    plan.forward = 1.7
    try:
        step(torch.zeros(4, 4))
    finally:
        plan.forward = 0.0


def the_step_after_it() -> None:
    step(torch.zeros(4, 4))


def in_backward() -> None:
    plan.backward = 1.7
    try:
        step(torch.zeros(4, 4))
    finally:
        plan.backward = 0.0


def a_long_checkpoint() -> None:
    plan.checkpoint = 1.6
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.ckpt"
        pipeline.save(path, optimizer=optimizer)
        pipeline.load(path, optimizer=optimizer)


def a_long_call() -> None:
    plan.forward = 1.7
    try:
        with torch.no_grad():
            pipeline(torch.zeros(1, 4))
    finally:
        plan.forward = 0.0


CASES: list[Callable[[], None]] = [
    in_forward,
    the_step_after_it,
    in_backward,
    a_long_call,
    a_long_checkpoint,
]

if __name__ == "__main__":
    model = nn.Sequential(nn.Linear(4, 4), Stage(), nn.Linear(4, 1))
    pipeline = mc.Pipeline(model, "cpu:3", stages=["1", "2"], micro_batches=2, hang_timeout=1, on_hang="raise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = pipeline.train_step(lambda model, x: model(x).square().mean(), optimizer)
    for _ in range(4):
        step(torch.zeros(4, 4))
    for case in CASES:
        print(f"== {case.__name__}", file=sys.stderr, flush=True)
        try:
            case()
        except HangError as error:
            print(f"HangError: {error}", file=sys.stderr, flush=True)
        else:
            print("ended well", file=sys.stderr, flush=True)
    pipeline.close()
