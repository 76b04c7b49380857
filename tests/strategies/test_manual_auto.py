"""``weights="auto"`` from the train step to the shares, with a clock that the losses move: nothing here is timed."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import manycard as mc
from manycard.cards import choose_cards
from manycard.cards.choose import SLOWDOWN_VARIABLE
from manycard.engine.driving import card_times, threads
from manycard.engine.driving.card_times import MeasuredTimes, StepTime
from manycard.errors import SettingError

from .cases import mse
from .models import Net


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(card_times, "thread_time", made)
    return made


class Training:
    """A model on simulated cards whose seconds a sample are known."""

    def __init__(self, clock: Clock, seconds: list[float], **settings: Any) -> None:
        self.seconds = seconds
        self.most: dict[int, int] = {}
        """How many samples some cards have memory for."""
        torch.manual_seed(0)
        self.module = Net()
        self.alone = copy.deepcopy(self.module)
        self.parallel = mc.Parallel("manual", cards=f"cpu:{len(seconds)}", **settings)
        optimizer = torch.optim.SGD(self.module.parameters(), lr=0.05, momentum=0.9)
        self.mine = torch.optim.SGD(self.alone.parameters(), lr=0.05, momentum=0.9)
        self.model, self.optimizer = self.parallel.setup(self.module, optimizer)

        def timed(model: Any, batch: Any) -> Tensor:
            place = threads.current_place()
            if place is not None:
                if len(batch[0]) > self.most.get(place.position, 1000):
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                clock.now += 0.001 + self.seconds[place.position] * len(batch[0])
            return mse(model, batch)

        self.step = self.parallel.train_step(timed, self.model, self.optimizer)

    def run(self, steps: int, samples: int = 48) -> None:
        """Train, beside one card."""
        for number in range(steps):
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(samples, 6, generator=generator)
            batch = (x, x[:, :3].sin())
            self.mine.zero_grad()
            expected = mse(self.alone, batch)
            expected.backward()
            self.mine.step()
            torch.testing.assert_close(self.step(batch), expected.detach(), rtol=1e-4, atol=1e-5)
        self.parallel.check_lockstep(self.model)

    @property
    def sizes(self) -> list[int]:
        return list(self.model.engine.cutter.sizes)


@pytest.mark.parametrize(
    ("seconds", "sizes"),
    [([0.01, 0.03], [36, 12]), ([0.01, 0.01, 0.03], [21, 20, 7]), ([0.03, 0.01, 0.01, 0.01], [5, 14, 15, 14])],
)
def test_a_slow_card_gets_less_and_the_training_stays_that_of_one_card(
    clock: Clock, seconds: list[float], sizes: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(clock, seconds, weights="auto")
    training.run(60)
    assert max(abs(found - wanted) for found, wanted in zip(training.sizes, sizes, strict=True)) <= 1
    lines = [line for line in capsys.readouterr().err.splitlines() if 'weights="auto"' in line]
    assert 1 <= len(lines) <= 2, "each change is one line"
    assert "a step took" in lines[0]
    assert "from now on each batch is cut cpu:0" in lines[0]
    training.parallel.close()


def test_equal_cards_keep_equal_shares_and_say_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training(clock, [0.01, 0.01])
    training.run(40)
    assert training.sizes == [24, 24]
    assert "auto" not in capsys.readouterr().err
    training.parallel.close()


def test_a_card_that_is_better_left_out_is_named(clock: Clock) -> None:
    training = Training(clock, [0.01, 10.0])
    with pytest.warns(UserWarning, match="cpu:1 takes longer for a single sample.*leave it out of cards="):
        training.run(60, samples=16)
    assert training.sizes == [15, 1]
    training.parallel.close()


def test_no_card_gets_more_than_its_memory_holds(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MeasuredTimes, "most_samples", lambda times: [30.0, float("inf")])
    training = Training(clock, [0.01, 0.03])
    training.run(60)
    assert training.sizes == [30, 18]
    training.parallel.close()


@pytest.mark.parametrize("most", [20, 9])
def test_a_card_that_runs_out_of_memory_gets_less(clock: Clock, most: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The step is taken again, so that the training stays one card's."""
    training = Training(clock, [0.01, 0.01])
    training.most = {1: most}
    training.run(40)
    assert training.sizes[1] <= most
    lines = [line for line in capsys.readouterr().err.splitlines() if "cpu:1 ran out of memory with" in line]
    assert 1 <= len(lines) <= 5
    assert "with 24 of 48 samples; from now on each batch is cut cpu:0" in lines[0]
    training.parallel.close()


def test_what_a_failed_attempt_held_is_freed_before_the_next() -> None:
    """An error's traceback holds a card's activations; without them the smaller share may fit."""
    torch.manual_seed(0)
    module = Net()
    parallel = mc.Parallel("manual", cards="cpu:2")
    model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.05))
    held: list[weakref.ref[Tensor]] = []

    def hungry(model: Any, batch: Any) -> Tensor:
        place = threads.current_place()
        if place is not None and place.position == 1:
            assert all(activation() is None for activation in held)
            activation = torch.ones(len(batch[0]))
            if len(activation) > 20:
                held.append(weakref.ref(activation))
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return mse(model, batch)

    step = parallel.train_step(hungry, model, optimizer)
    x = torch.randn(48, 6)
    collects = gc.isenabled()
    gc.disable()
    try:
        step((x, x[:, :3].sin()))
    finally:
        if collects:
            gc.enable()
    assert held
    parallel.close()


@pytest.mark.parametrize("settings", [{"weights": [1, 1]}, {"accumulate": 2}, {}])
def test_memory_that_no_shares_help_with_is_an_error(clock: Clock, settings: dict[str, Any]) -> None:
    """Given weights are kept, a group that has begun can't be cut anew, and all cards may be too small."""
    training = Training(clock, [0.01, 0.01], **settings)
    x = torch.randn(48, 6)
    batch = (x, x[:, :3].sin())
    if "accumulate" in settings:
        training.step(batch)
    training.most = {0: 20, 1: 20}
    with pytest.raises(torch.OutOfMemoryError):
        training.step(batch)
    training.most = {}
    for _ in range(4):
        training.step(batch)
    training.parallel.check_lockstep(training.model)
    training.parallel.close()


def test_shares_follow_a_card_that_becomes_slower(clock: Clock) -> None:
    training = Training(clock, [0.01, 0.01])
    training.run(40)
    training.seconds = [0.01, 0.03]
    training.run(100)
    assert training.sizes == [36, 12]
    training.parallel.close()


def test_accumulated_micro_batches_are_one_step(clock: Clock) -> None:
    training = Training(clock, [0.01, 0.03], accumulate=2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        x = torch.randn(48, 6, generator=generator)
        training.step((x, x[:, :3].sin()))
    assert training.sizes == [36, 12]
    training.parallel.close()


def test_found_shares_are_saved_and_taken_up(clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training(clock, [0.01, 0.03])
    training.run(30)
    training.parallel.save(tmp_path / "last.ckpt", model=training.model, optimizer=training.optimizer)
    training.parallel.close()
    capsys.readouterr()
    again = Training(clock, [0.01, 0.03])
    again.parallel.load(tmp_path / "last.ckpt", model=again.model, optimizer=again.optimizer)
    x = torch.randn(48, 6)
    for _ in range(40):
        again.step((x, x[:, :3].sin()))
    assert again.sizes == [36, 12]
    assert "weights" not in capsys.readouterr().err, "there was nothing left to find"
    again.parallel.close()
    even = mc.Parallel("dp", cards="cpu:3")  # a checkpoint of `manual` loads anywhere
    module = Net()
    model, optimizer = even.setup(module, torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9))
    even.load(tmp_path / "last.ckpt", model=model, optimizer=optimizer)
    even.close()


def test_a_failed_step_leaves_no_times_behind(clock: Clock) -> None:
    training = Training(clock, [0.01, 0.03])
    training.run(5)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            training.step((torch.randn(8, 5), torch.randn(8, 3)))
    training.run(40)
    assert training.sizes == [36, 12]
    training.parallel.close()


def test_a_loop_written_out_is_told_that_nothing_is_timed() -> None:
    parallel = mc.Parallel("manual", cards="cpu:2")
    module = Net()
    model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.05))
    batch = (torch.randn(8, 6), torch.randn(8, 3))

    def loop(steps: int) -> None:
        for _ in range(steps):
            parallel.backward(mse(model, batch))
            optimizer.step()
            optimizer.zero_grad()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop(7)
    with pytest.warns(UserWarning, match="in a loop written out shares stay equal"):
        loop(1)
    parallel.close()


# ---- simulated cards that are slowed on purpose --------------------------------------------------------------


def test_slowed_cards_take_as_many_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what they sleep, which is not waited for here."""
    slept: list[float] = []
    now = Clock()
    # In that module only: other threads of the process sleep too.
    monkeypatch.setattr(threads, "time", SimpleNamespace(thread_time=now, sleep=slept.append))
    monkeypatch.setenv(SLOWDOWN_VARIABLE, "1,3")
    cards = choose_cards("cpu:3").cards
    assert [card.slowdown for card in cards] == [1, 3, 1]

    def work() -> None:
        now.now += 0.5

    generators = card_generators(cards)
    card_threads = threads.CardThreads(cards, generators)
    card_threads.run([work] * 3)
    card_threads.close()
    assert slept == [1.0]


def card_generators(cards: Any) -> Any:
    from manycard.engine.driving.random import CardGenerators

    return CardGenerators(cards)


@pytest.mark.parametrize("value", ["fast", "0", "0.5,1", "1,-3", "inf", "nan"])
def test_slowdowns_that_are_none(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SLOWDOWN_VARIABLE, value)
    with pytest.raises(SettingError, match=f"{SLOWDOWN_VARIABLE}=.*Fix: write"):
        choose_cards("cpu:2")


# ---- the times themselves ------------------------------------------------------------------------------------


def test_the_spans_of_a_step_are_added_up_by_card(clock: Clock) -> None:
    times = MeasuredTimes(choose_cards("cpu:2").cards)
    for seconds in (1.0, 2.0):
        with times.of(0):
            clock.now += seconds
        with times.of(1):
            clock.now += 10 * seconds
        times.note_samples([4, 2])
    assert times.finished() == []
    times.close()
    assert times.finished() == [StepTime((8, 4), (3.0, 30.0))]
    assert times.finished() == []
    times.on = False
    with times.of(0):
        clock.now += 1
    times.close()
    times.on = True
    with times.of(0):
        clock.now += 1
    times.drop()
    times.close()
    assert times.finished() == []
    with times.of(0):
        clock.now += 1
    times.close()
    times.forget()
    assert times.finished() == []
    assert times.most_samples() == [float("inf")] * 2
