"""One iteration is what the script's author calls a step, however many optimizers it has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import manycard as mc
from manycard.hangs import PULSE
from manycard.hangs.iterations import RARE, Iterations

ROUNDS = 30


def steps(iterations: Iterations, turns: str) -> list[bool]:
    """Which steps end an iteration; each letter is an optimizer."""
    numbers = iterations.__dict__.setdefault("letters", {})
    return [iterations.stepped(numbers.setdefault(who, len(numbers))) for who in turns]


def count(iterations: Iterations, turns: list[str]) -> list[int]:
    """How many end in each turn."""
    return [sum(steps(iterations, turn)) for turn in turns]


@pytest.mark.parametrize(
    ("turn", "expected"),
    [("a", 1), ("dg", 1), ("gd", 1), ("dddddg", 1), ("gddddd", 1), ("ddgg", 1), ("abc", 1), ("abac", 2)],
)
def test_a_round_of_optimizers_that_take_turns_is_one_iteration(turn: str, expected: int) -> None:
    iterations = Iterations()
    counts = count(iterations, [turn] * ROUNDS)
    assert counts[2:] == [expected] * (ROUNDS - 2), "a round is learned from the first that is over"
    assert sum(counts[:2]) >= 1


@pytest.mark.parametrize("turn", ["dg", "dddddg", "ddgg", "abc"])
def test_an_iteration_ends_with_the_last_step_of_its_round(turn: str) -> None:
    iterations = Iterations()
    ended = steps(iterations, turn * 3)
    assert ended[2 * len(turn) :] == [False] * (len(turn) - 1) + [True]


def test_an_optimizer_that_steps_now_and_then_ends_no_iteration_of_another() -> None:
    iterations = Iterations()
    turn = "a" * (RARE + 5) + "b"
    assert sum(steps(iterations, turn * 8)) == pytest.approx(8 * (RARE + 5), abs=1)


def test_an_optimizer_that_is_gone_is_not_waited_for() -> None:
    iterations = Iterations()
    steps(iterations, "dg" * 10)
    assert all(steps(iterations, "d" * 2 * RARE)[RARE:])
    steps(iterations, "dg" * 10)
    assert all(steps(iterations, "dgn" + "n" * 10)[2:]), "a new one alone is followed at once"


def test_rounds_of_changing_length_are_each_counted_once() -> None:
    iterations = Iterations()
    turns = ["d" * number + "g" for number in (100, 100, 5, 5, 1, 7, 3, 5)]
    assert count(iterations, turns)[3:] == [1] * 5
    turns = ["d" + "g" * number for number in (1, 2, 2, 1, 1, 3, 1, 1)]
    assert sum(count(Iterations(), turns)) == pytest.approx(8, abs=2)


def test_a_step_that_loss_scaling_skips_does_not_mix_rounds_up() -> None:
    iterations = Iterations()
    turns = ["dg", "dg", "g", "dg", "d", "dg", "dg"]
    counts = count(iterations, [*turns, "dg", "dg"])
    assert counts[-3:] == [1, 1, 1]
    assert sum(counts[1:]) >= len(turns) - 2


# ---- real loops --------------------------------------------------------------------------------------------


@pytest.fixture
def counted() -> Callable[[], int]:
    """How many steps there were since the test began."""
    PULSE.follow_optimizers()
    before = PULSE.steps
    return lambda: PULSE.steps - before


def made(rate: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Linear(4, 1)
    return net, torch.optim.SGD(net.parameters(), lr=rate)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, *, step: bool = True) -> None:
    net(torch.ones(8, 4)).square().mean().backward()
    if step:
        optimizer.step()
        optimizer.zero_grad()


def test_a_loop_with_one_optimizer_and_one_with_accumulation(counted: Callable[[], int]) -> None:
    net, optimizer = made()
    for number in range(12):
        train(net, optimizer, step=number % 3 == 2)
    assert counted() == 4


def test_a_gan_loop_is_one_step_an_iteration_for_profiles_too(counted: Callable[[], int], tmp_path: object) -> None:
    critic, generator = made(), made()
    parallel = mc.Parallel("single", cards="cpu:1")
    with parallel.profile(steps=4, skip=3, out=str(tmp_path), say=False) as profiling:
        for _ in range(12):
            train(*critic)
            train(*critic)
            train(*generator)
    parallel.close()
    assert counted() == 14, "in the first round, the critic's steps are counted too"
    assert profiling.result is not None
    assert profiling.result.steps == 4
    updates = [name for name in profiling.result.setup.optimizers if "SGD" in name]
    assert updates


def test_train_steps_that_take_turns_are_one_step_and_one_alone_is_one_a_call(counted: Callable[[], int]) -> None:
    parallel = mc.Parallel("dp", cards="cpu:2", accumulate=2)
    made_steps = []
    for _ in range(2):
        model, optimizer = parallel.setup(*made())
        made_steps.append(parallel.train_step(lambda model, x: model(x).mean(), model, optimizer, check_loss=False))
    for _ in range(5):
        made_steps[0](torch.ones(4, 4))
    assert counted() == 5
    for _ in range(6):
        made_steps[0](torch.ones(4, 4))
        made_steps[1](torch.ones(4, 4))
    assert counted() == 12, "the first step of the other one begins something new, for all that is known by then"
    parallel.close()
