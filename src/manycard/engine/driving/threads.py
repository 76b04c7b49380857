"""The threads that drive the cards: one a card, made once, each running its part of a job.

Intended behaviour:
    * `CardThreads.run` gives each card's job to its thread (one of them to the calling thread, if asked), and
      returns their results in order when all have ended.
    * Real cards run at the same time. Simulated ones share one CPU and one random generator, so they run in turn,
      always in the same order: draws repeat from one seed. A card that waits for others in `meet` or `wait` passes
      its turn on.
    * When a job fails, cards waiting for others are woken at once; when all have ended, the first failure is raised
      in the caller as it was, with a note naming the card. The threads are ready for the next job.
    * Ctrl-C arrives in the caller at once. The cards finish what they do; the next `run` waits for that first.
    * A simulated card that is slowed on purpose sleeps after each of its jobs, as a part of it.
    * One job at a time: a second thread of the script's that calls waits its turn.
    * The threads hold no reference to this object. They end when it is dropped, and never keep the process alive; but
      one that ends in the middle of a step (by Ctrl-C) waits up to 30 s for the cards to finish what they do, or until
      Ctrl-C comes again. A thread that Python takes down inside PyTorch would abort the process.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, cast

import torch

from manycard.cards.card import Card
from manycard.engine.driving.card_times import CardTimes
from manycard.engine.driving.context import ThreadContext, in_copied_variables
from manycard.engine.driving.random import CardGenerators
from manycard.engine.driving.spans import span
from manycard.errors import ModelError

__all__ = ["CardThreads", "Place", "card_of", "current_place", "with_note"]

Job = Callable[[], Any]
_here = threading.local()
_CARD = "manycard_card"
"""The attribute of a failure that says on which card it was raised."""


@dataclass(frozen=True)
class Place:
    """Where code runs: on which card of which threads."""

    threads: CardThreads
    position: int

    def meet(self, value: Any) -> list[Any]:
        """Hand in `value`, wait for every other card of the running job, and get all values in card order."""
        return self.threads.meet(self.position, value)

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready`, which other cards of the running job make true; they call `notify` when they may have."""
        self.threads.wait(self.position, ready)


def current_place() -> Place | None:
    """The card whose job the calling thread runs; None outside any."""
    return getattr(_here, "place", None)


def card_of(failure: BaseException) -> int | None:
    """The position of the card on which a failure was raised that came out of `CardThreads.run`."""
    return getattr(failure, _CARD, None)


class _MeetingAbortedError(Exception):
    """Another card's job has failed: what this card waits for will not come."""


class _Round:
    """One job of all cards: who takes a turn, who has ended, and what they hand each other."""

    def __init__(self, positions: Sequence[int], in_turn: bool) -> None:
        self.positions = tuple(positions)
        self.results: dict[int, Any] = {}
        self.failures: list[tuple[int, BaseException]] = []
        self.ended: SimpleQueue[int] = SimpleQueue()
        self.outstanding = set(self.positions)
        self._running = set(self.positions)
        self._in_turn = in_turn
        self._turn = self.positions[0]
        self._handed_in: dict[int, Any] = {}
        self._met: list[Any] = []
        self._meetings = 0
        self._failed = False
        self._changed = threading.Condition()

    def begin(self, position: int) -> None:
        """Wait until it is this card's turn."""
        if self._in_turn:
            with self._changed:
                self._changed.wait_for(lambda: self._turn == position)

    def end(self, position: int, failure: BaseException | None) -> None:
        """Note that this card has ended and pass the turn on."""
        with self._changed:
            self._running.discard(position)
            if failure is not None:
                self._failed = True
                if not isinstance(failure, _MeetingAbortedError):
                    self.failures.append((position, failure))
            self._pass_turn(position)
            self._changed.notify_all()
        # Before the queue wakes the caller: Ctrl-C may take from it what the queue gave it.
        self.outstanding.discard(position)
        self.ended.put(position)

    def _pass_turn(self, position: int) -> None:
        later = [other for other in self.positions if other > position and other in self._running]
        earlier = [other for other in self.positions if other <= position and other in self._running]
        self._turn = (later + earlier or [position])[0]

    def meet(self, position: int, value: Any) -> list[Any]:
        """See `Place.meet`.

        Raises:
            ModelError: a card has ended its job without coming here.
        """
        with self._changed:
            self._handed_in[position] = value
            meeting = self._meetings
            if len(self._handed_in) == len(self.positions):
                self._met = [self._handed_in[card] for card in self.positions]
                self._handed_in = {}
                self._meetings += 1
            self._pass_turn(position)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._may_go_on(position, meeting))
            if self._meetings > meeting:
                return self._met
            if self._failed:
                raise _MeetingAbortedError
            raise ModelError(
                "a layer that needs all cards (synchronised BatchNorm) ran on some cards and not on others",
                fix="run the same synchronised layers on every shard, or leave sync_batchnorm off",
            )

    def wait(self, position: int, ready: Callable[[], bool]) -> None:
        """See `Place.wait`."""
        with self._changed:
            while True:
                if self._failed:
                    raise _MeetingAbortedError
                if not self._in_turn or self._turn == position:
                    if ready():
                        return
                    self._pass_turn(position)
                    self._changed.notify_all()
                self._changed.wait()

    def notify(self) -> None:
        """Let cards that `wait` look again."""
        with self._changed:
            self._changed.notify_all()

    def _may_go_on(self, position: int, meeting: int) -> bool:
        if self._in_turn and self._turn != position:
            return False
        met = self._meetings > meeting
        return met or self._failed or len(self._handed_in) >= len(self._running) < len(self.positions)


class CardThreads:
    """One thread for each card.

    Args:
        cards: the cards, the primary first.
        generators: their random states.
    """

    def __init__(self, cards: Sequence[Card], generators: CardGenerators) -> None:
        self.cards = tuple(cards)
        self.devices = [card.device for card in cards]
        self.generators = generators
        self._simulated = any(card.simulated for card in cards)
        self._inboxes: list[SimpleQueue[Any]] = [SimpleQueue() for _ in cards]
        self._started = [False] * len(self.cards)
        self._one_at_a_time = threading.Lock()
        self._round: _Round | None = None
        self._finalizer = weakref.finalize(self, _stop, self._inboxes)

    def run(self, jobs: Sequence[Job | None], times: CardTimes | None = None, *, here: int | None = None) -> list[Any]:
        """Run one job on each card and wait for all.

        Args:
            jobs: a job for each card; None for a card that has nothing to do.
            times: notes how long each card takes.
            here: the card whose job runs in the calling thread.

        Returns:
            Their results, by card; None for a card without a job.
        """
        positions = [position for position, job in enumerate(jobs) if job is not None]
        jobs = [job and self._as_on_card(position, job, times) for position, job in enumerate(jobs)]
        with self._one_at_a_time:
            self._finish_interrupted()
            self._reopen()
            self.generators.follow_seed()
            context = ThreadContext.capture(self.devices)
            job_round = _Round(positions, in_turn=self._simulated or context.shared_modes)
            self._round = job_round
            _running.add(job_round)
            self._hand_out(job_round, context, jobs, here)
            self._wait(job_round)
            self._round = None
        if job_round.failures:
            position, failure = job_round.failures[0]
            card = self.cards[position]
            setattr(failure, _CARD, position)
            raise with_note(failure, f"raised on card {card.position} ({card.name})")
        return [job_round.results.get(position) for position in range(len(jobs))]

    def meet(self, position: int, value: Any) -> list[Any]:
        """`Place.meet` for the card at `position`, from whichever thread works for it."""
        job_round = self._round
        assert job_round is not None, "cards meet only while a job runs"
        self.generators.leave(position)
        try:
            return job_round.meet(position, value)
        finally:
            self.generators.enter(position)

    def wait(self, position: int, ready: Callable[[], bool]) -> None:
        """`Place.wait` for the card at `position`."""
        job_round = self._round
        assert job_round is not None, "cards wait only while a job runs"
        self.generators.leave(position)
        try:
            job_round.wait(position, ready)
        finally:
            self.generators.enter(position)

    def notify(self) -> None:
        """Let cards that wait look again whether they may go on; does nothing while no job runs."""
        job_round = self._round
        if job_round is not None:
            job_round.notify()

    def finish(self) -> None:
        """Wait for what Ctrl-C left running, before anything that it works on is touched."""
        with self._one_at_a_time:
            self._finish_interrupted()

    def _reopen(self) -> None:
        """Be ready for work again after `close`."""
        if not self._finalizer.alive:
            self._inboxes = [SimpleQueue() for _ in self.cards]
            self._started = [False] * len(self.cards)
            self._finalizer = weakref.finalize(self, _stop, self._inboxes)

    def close(self) -> None:
        """End the threads; they finish what they do first. Work that comes later starts new ones."""
        self._finalizer()

    def _hand_out(
        self, job_round: _Round, context: ThreadContext, jobs: Sequence[Job | None], here: int | None
    ) -> None:
        """Give every card its job; what Ctrl-C keeps from being given counts as ended."""
        given: set[int] = set()
        try:
            for position in job_round.positions:
                if position != here:
                    self._send(position, job_round, context, cast(Job, jobs[position]))
                    given.add(position)
            if here is not None and here in job_round.positions:
                given.add(here)
                self._run_here(here, job_round, cast(Job, jobs[here]))
        except BaseException as interrupt:
            for position in job_round.positions:
                if position not in given:
                    job_round.end(position, _MeetingAbortedError())
            raise interrupt

    def _as_on_card(self, position: int, job: Job, times: CardTimes | None) -> Job:
        """A job as slow as its card, and timed."""
        if self.cards[position].slowdown != 1:
            job = partial(_slowed, job, self.cards[position].slowdown)
        return job if times is None else partial(times.timed, position, job)

    def _send(self, position: int, job_round: _Round, context: ThreadContext, job: Job) -> None:
        if not self._started[position]:
            name = f"manycard-{self.cards[position].name}"
            args = (self._inboxes[position], self.devices[position], self.cards[position].name)
            threading.Thread(target=_serve, args=args, name=name, daemon=True).start()
            self._started[position] = True
        place = Place(cast(CardThreads, weakref.proxy(self)), position)
        self._inboxes[position].put((place, job_round, context, self.generators, in_copied_variables(job)))

    def _run_here(self, position: int, job_round: _Round, job: Job) -> None:
        before = current_place()
        _here.place = Place(self, position)
        device = self.devices[position]
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                _run_job(position, job_round, self.generators, job, self.cards[position].name)
        finally:
            _here.place = before

    def _wait(self, job_round: _Round) -> None:
        while job_round.outstanding:
            job_round.ended.get()

    def _finish_interrupted(self) -> None:
        """Wait for what Ctrl-C left running."""
        if self._round is not None:
            self._wait(self._round)
            self._round = None


_running: weakref.WeakSet[_Round] = weakref.WeakSet()
"""Jobs that may be under way; whoever gave one may be gone, but the cards hold it until it has ended."""
_SECONDS_AT_EXIT = 30.0


@atexit.register
def _finish_at_exit() -> None:
    end = time.monotonic() + _SECONDS_AT_EXIT
    try:
        for job_round in list(_running):
            while job_round.outstanding and time.monotonic() < end:
                time.sleep(0.01)
    except KeyboardInterrupt:  # somebody who can't wait
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(130)


os.register_at_fork(after_in_child=_running.clear)  # a child has none of the threads


def _run_job(position: int, job_round: _Round, generators: CardGenerators, job: Job, place: str) -> None:
    """Run the job of the card called `place` in its turn and note how it ended."""
    failure: BaseException | None = None
    job_round.begin(position)
    generators.enter(position)
    try:
        with span("job", place):
            job_round.results[position] = job()
    except BaseException as error:
        failure = error
    generators.leave(position)
    job_round.end(position, failure)


def _slowed(job: Job, factor: float) -> Any:
    """Run a job in `factor` times the time that it computes."""
    begin = time.thread_time()
    try:
        return job()
    finally:
        time.sleep((factor - 1) * (time.thread_time() - begin))


def _serve(inbox: SimpleQueue[Any], device: torch.device, name: str) -> None:
    """A card thread's life: run jobs until told to stop."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    while True:
        order = inbox.get()
        if order is None:
            return
        place, job_round, context, generators, job = order
        del order
        _here.place = place

        def in_context(context: ThreadContext = context, job: Job = job) -> Any:
            with context.entered(device):
                return job()

        _run_job(place.position, job_round, generators, in_context, name)
        _here.place = None
        # An idle thread must hold nothing: not the model its last job closed over, and not the engine.
        del place, job_round, context, generators, job, in_context


def _stop(inboxes: list[SimpleQueue[Any]]) -> None:
    for inbox in inboxes:
        inbox.put(None)


def with_note(failure: BaseException, note: str) -> BaseException:
    """`failure` with a further note (in its message, before Python 3.11)."""
    if sys.version_info >= (3, 11):
        failure.add_note(note)
    elif failure.args and isinstance(failure.args[0], str):
        failure.args = (f"{failure.args[0]}\n{note}", *failure.args[1:])
    return failure
