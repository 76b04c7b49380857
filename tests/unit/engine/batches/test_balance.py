"""Shares from recorded times: cards come to finish together, and stay with what they have when times only waver.

Cards here are numbers: a fixed time, and one for each sample. No test waits for anything.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from manycard.engine.batches.balance import Balancer, Change, bounded
from manycard.engine.batches.sizes import weighted_sizes
from manycard.engine.driving.card_times import StepTime

Line = tuple[float, float]
"""Milliseconds of a step that are always there, and of each sample."""


@dataclass
class Machine:
    """Cards that take known times, with noise, and a balancer that is told them."""

    lines: Sequence[Line]
    batch: int = 128
    noise: float = 0.0
    seed: int = 0
    most: Sequence[float] | None = None
    changes: list[tuple[int, Change]] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self.balancer = Balancer(len(self.lines))
        self.draws = random.Random(self.seed)

    @property
    def sizes(self) -> list[int]:
        return weighted_sizes(self.batch, self.balancer.weights, everyone=True)

    def slowest(self, sizes: Sequence[int]) -> float:
        """Milliseconds of a step, without noise."""
        return max(fixed + each * size for (fixed, each), size in zip(self.lines, sizes, strict=True))

    def take(self, sizes: Sequence[int]) -> tuple[float, ...]:
        """What cards take in one step: now and then one of them is held up."""
        held_up = [3 if self.noise and self.draws.random() < 0.02 else 1 for _ in sizes]
        factors = [held * (1 + abs(self.draws.gauss(0, self.noise))) for held in held_up]
        return tuple(
            (fixed + each * size) * factor
            for (fixed, each), size, factor in zip(self.lines, sizes, factors, strict=True)
        )

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.steps += 1
            if self.steps % self.balancer.every:
                continue
            sizes = self.sizes
            step = StepTime(tuple(sizes), self.take(sizes))
            change = self.balancer.note(step, lambda: self.most or [1.0] * len(self.lines))
            if change is not None:
                self.changes.append((self.steps, change))


EQUAL, SLOW = [(2.0, 0.1), (2.0, 0.1)], [(2.0, 0.1), (6.0, 0.3)]
MACHINES = [SLOW, [(1.0, 0.1), (1.0, 0.1), (3.0, 0.3)], [(1.0, 0.2)] * 3 + [(2.0, 0.4)], [(60.0, 1.0), (180.0, 3.0)]]


def best(machine: Machine) -> float:
    """The shortest step that any sizes of two kinds of cards give, by trying them all."""
    slow = machine.lines[-1]
    fast = len(machine.lines) - 1
    tried = []
    for size in range(1, machine.batch):
        rest = weighted_sizes(machine.batch - size, [1] * fast)
        if all(rest):
            tried.append(max(slow[0] + slow[1] * size, machine.slowest([*rest, 0])))
    return min(tried)


@pytest.mark.parametrize("lines", MACHINES)
@pytest.mark.parametrize(("noise", "reached"), [(0.0, 0.97), (0.05, 0.95), (0.2, 0.88)])
def test_cards_come_to_finish_together(lines: list[Line], noise: float, reached: float) -> None:
    machine = Machine(lines, noise=noise)
    equal = machine.slowest(machine.sizes)
    machine.run(300)
    assert best(machine) / machine.slowest(machine.sizes) >= reached
    if lines is SLOW:
        assert equal / machine.slowest(machine.sizes) >= 1.5


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.15])
def test_equal_cards_keep_equal_shares(noise: float, seed: int) -> None:
    machine = Machine([(2.0, 0.1)] * 4, noise=noise, seed=seed)
    machine.run(2000)
    assert not machine.changes


@pytest.mark.parametrize("seed", range(3))
def test_found_shares_are_left_alone(seed: int) -> None:
    """Few changes at the beginning, hardly any later: shares don't flap."""
    machine = Machine(SLOW, noise=0.1, seed=seed)
    machine.run(100)
    early = len(machine.changes)
    assert 1 <= early <= 4
    machine.run(4000)
    assert len(machine.changes) <= early + 2


def test_a_card_that_becomes_slower_and_faster_is_followed() -> None:
    machine = Machine(EQUAL, noise=0.05)
    machine.run(200)
    assert not machine.changes
    machine.lines = SLOW
    machine.run(100)
    assert best(machine) / machine.slowest(machine.sizes) > 0.95
    assert 1 <= len(machine.changes) <= 3
    machine.lines = EQUAL
    machine.run(300)
    assert best(machine) / machine.slowest(machine.sizes) > 0.95


def test_one_bad_window_changes_nothing_once_settled() -> None:
    machine = Machine(EQUAL)
    machine.run(100)
    machine.lines = SLOW
    machine.run(machine.balancer.patience.settled_window * machine.balancer.every)
    machine.lines = EQUAL
    machine.run(300)
    assert not machine.changes


def test_a_change_that_makes_steps_longer_is_taken_back_once() -> None:
    """Times that follow no line: whatever the first card gets above half takes ten times as long."""

    class Cliff(Machine):
        def take(self, sizes: Sequence[int]) -> tuple[float, ...]:
            return (10.0 if sizes[0] <= 64 else 100.0, 12.0 * sizes[1] / 64)

    machine = Cliff(EQUAL)
    machine.run(1000)
    taken_back = [change for _, change in machine.changes if change.taken_back]
    assert taken_back
    assert machine.sizes == [64, 64]
    late = [step for step, _ in machine.changes if step > 300]
    assert len(late) <= 2, "each time it is taken back, more must be expected of the next"


def test_no_share_grows_beyond_its_cards_memory() -> None:
    machine = Machine(SLOW, most=[0.6, 1.0])
    machine.run(300)
    assert machine.balancer.weights == pytest.approx((0.6, 0.4))
    assert len(machine.changes) == 1


def test_memory_that_holds_no_shares_at_all_changes_nothing() -> None:
    machine = Machine(SLOW, most=[0.4, 0.4])
    machine.run(300)
    assert not machine.changes


def test_a_few_samples_can_only_be_moved_whole() -> None:
    machine = Machine([(0.0, 1.0), (0.0, 1.3)], batch=4)
    machine.run(500)
    assert not machine.changes, "3 and 1 would take longer than 2 and 2"


def test_short_last_batches_and_warm_up_don_t_count() -> None:
    balancer = Balancer(2)
    changes = []
    for number in range(200):
        if number < balancer.patience.warm_up:
            step = StepTime((64, 64), (1.0, 9.0))
        elif number % 5 == 0:
            step = StepTime((2, 1), (1.0, 9.0))
        else:
            step = StepTime((64, 64), (1.0, 1.0))
        changes.append(balancer.note(step, lambda: [1.0, 1.0]))
    assert not any(changes)


def test_a_card_so_slow_that_it_is_hardly_used_keeps_a_sample() -> None:
    machine = Machine([(1.0, 0.1), (1.0, 100.0)], batch=32)
    machine.run(500)
    assert machine.sizes == [31, 1]
    assert machine.balancer.held_up_by == 1
    found = Machine(SLOW)
    found.run(500)
    assert found.balancer.held_up_by is None


def test_shares_found_before_are_gone_on_from() -> None:
    machine = Machine(SLOW)
    machine.balancer.start_from([6, 2])
    assert machine.sizes == [96, 32]
    machine.run(300)
    assert len(machine.changes) <= 2


@pytest.mark.parametrize(
    ("shares", "most", "found"),
    [
        ([0.75, 0.25], [1.0, 1.0], (0.75, 0.25)),
        ([0.75, 0.25], [0.6, float("inf")], (0.6, 0.4)),
        ([0.6, 0.3, 0.1], [0.4, 0.35, 1.0], (0.4, 0.35, 0.25)),
        ([0.5, 0.5], [0.4, 0.4], None),
    ],
)
def test_bounds(shares: list[float], most: list[float], found: tuple[float, ...] | None) -> None:
    assert bounded(shares, most) == (None if found is None else pytest.approx(found))
