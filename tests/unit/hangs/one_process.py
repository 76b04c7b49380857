"""Hangs planted in one process, one after the other; what became of each is printed."""

from __future__ import annotations

import pdb
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import manycard as mc
from manycard.errors import HangError
from manycard.hangs import PULSE, hang_settings

plan = SimpleNamespace(card="", seconds=0.0)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    if plan.card and threading.current_thread().name.endswith(plan.card):
        time.sleep(plan.seconds)  # a card's part that does not end
    return model(x).square().mean()


class Stuck(Dataset[Tensor]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Tensor:
        if index == 50:
            time.sleep(60)
        return torch.zeros(4)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.zeros(30, 4)
        time.sleep(60)


def a_card_in_loss_fn() -> None:
    plan.card, plan.seconds = "cpu:1", 1.7
    try:
        step(torch.zeros(6, 4))
    finally:
        plan.card = ""


def the_step_after_it() -> None:
    step(torch.zeros(6, 4))


def a_loader_of_ours() -> None:
    for x in parallel.loader(Stuck(), batch_size=6):
        step(x)


def a_data_loader() -> None:
    for x in DataLoader(Stream(), batch_size=6, num_workers=1):
        step(x)


def only_said() -> None:
    PULSE.ask_for(hang_settings(1, "say"))
    plan.card, plan.seconds = "cpu:2", 2.0 + 3.5 * PULSE.step_seconds
    step(torch.zeros(6, 4))
    plan.card = ""
    for _ in range(3):
        step(torch.zeros(6, 4))
        time.sleep(0.3)
    PULSE.ask_for(hang_settings(1, "raise"))


def long_code_of_the_script() -> None:
    time.sleep(2.5)


def long_evaluation() -> None:
    def slow(model: nn.Module, x: Tensor) -> dict[str, tuple[Tensor, int]]:
        if threading.current_thread().name.endswith("cpu:0"):
            time.sleep(2.0)
        return {"mean": (model(x).sum(), len(x))}

    parallel.evaluate(slow, model, parallel.loader(torch.zeros(6, 4), batch_size=6))


def an_evaluation_of_many_batches() -> None:
    def slow(model: nn.Module, x: Tensor) -> dict[str, tuple[Tensor, int]]:
        if threading.current_thread().name.endswith("cpu:0"):
            time.sleep(0.7)
        return {"mean": (model(x).sum(), len(x))}

    parallel.evaluate(slow, model, [torch.zeros(6, 4)] * 11)  # beyond what one batch may take


def a_debugger_in_loss_fn() -> None:
    commands = iter(["p len(x)", "c"])

    def stop(model: nn.Module, x: Tensor) -> Tensor:
        if threading.current_thread().name.endswith("cpu:0"):
            debugger = pdb.Pdb(stdin=Slow(commands), stdout=sys.stderr)  # type: ignore[arg-type]
            debugger.use_rawinput = False
            debugger.set_trace()
        return model(x).square().mean()

    parallel.train_step(stop, model, optimizer, check_loss=False)(torch.zeros(6, 4))
    sys.settrace(None)


class Slow:
    """Somebody who thinks before each command."""

    def __init__(self, commands: Iterator[str]) -> None:
        self._commands = commands

    def readline(self) -> str:
        time.sleep(1.5)
        return next(self._commands) + "\n"


CASES: list[Callable[[], None]] = [
    a_card_in_loss_fn,
    the_step_after_it,
    a_loader_of_ours,
    a_data_loader,
    only_said,
    long_code_of_the_script,
    long_evaluation,
    an_evaluation_of_many_batches,
    a_debugger_in_loss_fn,
]

if __name__ == "__main__":
    parallel = mc.Parallel("dp", cards="cpu:3", seed=0, hang_timeout=1, on_hang=sys.argv[1])
    net = nn.Linear(4, 1)
    model, optimizer = parallel.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    step = parallel.train_step(loss_fn, model, optimizer)
    for _ in range(4):
        step(torch.zeros(6, 4))
    for case in CASES:
        print(f"== {case.__name__}", file=sys.stderr, flush=True)
        try:
            case()
        except HangError as error:
            print(f"HangError: {error}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            print("KeyboardInterrupt", file=sys.stderr, flush=True)
        else:
            print("ended well", file=sys.stderr, flush=True)
    parallel.close()
