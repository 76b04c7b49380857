"""Leaks of each kind are found within 50 steps, and who keeps them; memory that only moves is none."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import manycard as mc
from manycard.diagnosis.finding import Finding
from manycard.diagnosis.memory_use import GrowthWatch

MEGABYTE = 2**18
"""Elements of fp32."""
kept_losses: list[Tensor] = []


class Trainer:
    """Keeps what it is told to keep."""

    def __init__(self) -> None:
        self.history: list[tuple[int, Tensor]] = []
        self.cache: dict[int, Tensor] = {}
        self.newest: deque[Tensor] = deque(maxlen=3)


def watched(step: Callable[[int], object]) -> list[Finding]:
    found: list[Finding] = []
    watch = GrowthWatch(found.append)
    for number in range(50):
        step(number)
        watch.stepped()
    return found


def a_model() -> tuple[Callable[[bool], Tensor], nn.Module]:
    net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 4))
    optimizer = torch.optim.Adam(net.parameters())

    def train(keep: bool) -> Tensor:
        loss: Tensor = net(torch.randn(512, 64)).square().mean()
        loss.backward(retain_graph=keep)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train, net


def test_kept_losses_with_their_graphs_are_found() -> None:
    train, _ = a_model()
    (found,) = watched(lambda number: kept_losses.append(train(True)))
    kept_losses.clear()
    assert "`kept_losses` of module" in found.cause
    assert "list" in found.cause
    assert "with the graph of the step that made each" in found.evidence
    assert "append(loss.detach())" in found.fix


def test_a_sum_of_losses_whose_graph_grows_is_found() -> None:
    train, _ = a_model()
    total: Tensor = torch.zeros(())

    def step(number: int) -> None:
        nonlocal total
        total = total + train(True)

    (found,) = watched(step)
    assert "`total` in test_growth.py" in found.cause
    assert "a tensor of a single number, with a graph that grows" in found.evidence
    assert re.search(r"; kept at test_growth.py:\d+: total = total \+ train\(True\)", found.evidence)
    assert "total += loss.item()" in found.fix


def test_a_megabyte_a_step_in_an_attribute_of_an_object() -> None:
    trainer = Trainer()
    (found,) = watched(lambda number: trainer.history.append((number, torch.zeros(MEGABYTE))))
    assert "list `history` of Trainer keeps tensors of every step" in found.cause
    assert found.evidence.startswith("1.00 MB a step over 24 steps; ")
    assert "more tensors of 262144; kept at test_growth.py:" in found.evidence
    assert "deque(maxlen=...)" in found.fix


def test_a_cache_and_a_list_in_a_local_variable() -> None:
    trainer, outputs = Trainer(), list[Tensor]()
    (found,) = watched(lambda number: trainer.cache.setdefault(number, torch.zeros(MEGABYTE)))
    assert "dict `cache` of Trainer" in found.cause
    assert re.search(r"kept at test_growth.py:\d+: .*trainer.cache.setdefault\(", found.evidence)
    (found,) = watched(lambda number: outputs.append(torch.zeros(MEGABYTE)))
    assert "list `outputs` in test_growth.py" in found.cause


def test_nothing_is_said_of_memory_that_only_moves() -> None:
    train, net = a_model()
    trainer = Trainer()
    last: dict[str, Tensor] = {}

    def step(number: int) -> None:
        last["loss"] = train(False).detach()
        trainer.newest.append(torch.zeros(MEGABYTE))
        trainer.history.append((number, torch.zeros(())))
        if number == 9:
            net.register_buffer("late", torch.zeros(4 * MEGABYTE))

    assert watched(step) == []


def test_parallel_warns_of_it_and_says_what_memory_is_for() -> None:
    parallel = mc.Parallel("dp", cards="cpu:2", seed=0)
    net = nn.Linear(512, 512)
    model, optimizer = parallel.setup(net, torch.optim.AdamW(net.parameters()))
    step = parallel.train_step(lambda model, x: model(x).square().mean(), model, optimizer, check_loss=False)
    outputs = []
    watch = parallel.watch_memory(every=2)
    for _ in range(7):
        outputs.append(torch.ones(128, 512))
        step(outputs[-1])
    with pytest.warns(UserWarning, match="list `outputs` in test_growth.py"):
        step(torch.ones(2, 512))
    watch.stop()
    report = parallel.memory()
    first, second = report.cards
    assert first.parameters == second.parameters == 4 * (512 * 512 + 512)
    assert first.optimizer == second.optimizer == 2 * first.parameters + 8
    assert first.gradients == second.gradients >= first.parameters
    assert report.findings == []
    assert str(report).startswith("cpu:0: parameters 1 MiB, gradients 1 MiB")
    parallel.close()
    with pytest.raises(mc.errors.SettingError, match="simulated cards have none"):
        parallel.memory(snapshot="memory.pickle")
    with pytest.raises(mc.errors.SettingError, match="every=0"):
        parallel.watch_memory(every=0)
