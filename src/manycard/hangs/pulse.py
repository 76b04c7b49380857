"""What this process does at the moment, and since when: what a hang is told by.

Behaviour:
    * ``stepped`` says that an optimizer or a train step has stepped. Where that ends an iteration of the training
      (`iterations`), a step has ended, which is a ``beat``; elsewhere it is progress. ``busy`` says what runs
      meanwhile: a step, a wait for the loader, an evaluation, a checkpoint. All cost a microsecond or two and wait for
      nothing.
    * The time without a beat that counts as a hang follows what was measured: 20 times the longest of the newest steps,
      and at least `AUTO` seconds, or what the script or the command line asks for. The first steps (start-up,
      compilation, autotuning), evaluations and checkpoints get `SLACK` times as much.
    * In a rank, the same is written to memory that the launcher reads.
    * Ctrl-C that the watch has sent leaves ``busy`` as HangError, with what was found.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from manycard.errors import HangError, SettingError
from manycard.hangs.iterations import Iterations

__all__ = ["ACTIONS", "AUTO", "PULSE", "SLACK", "HangSettings", "Pulse", "PulseFile", "hang_settings"]

AUTO = 300.0
"""The least time that counts as a hang, in seconds, where none is asked for."""
SLACK = 6.0
"""How many times as much the first steps, evaluations and checkpoints get."""
ACTIONS = ("end", "raise", "say")
_TIMES = 20.0
_OF_GIVEN = 3.0
_FIRST_STEPS = 3
_SLACK_FOR = frozenset({"evaluation", "checkpoint"})
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class HangSettings:
    """When a process is taken to hang, and what happens then."""

    seconds: float | None = None
    """Without progress; None for automatic, infinity for never."""
    action: str = "end"
    """``"end"`` the process, ``"raise"`` HangError in the main thread, or only ``"say"`` it."""

    def limit(self, steps: Iterable[float], count: int, activity: str) -> float:
        """Seconds without a beat that count as a hang.

        Args:
            steps: how long the newest steps took.
            count: how many steps there have been.
            activity: what runs.
        """
        longest = max(steps, default=0.0)
        least = AUTO if self.seconds is None else self.seconds
        slack = SLACK if count < _FIRST_STEPS or activity in _SLACK_FOR else 1.0
        return max(least * slack, longest * (_TIMES if self.seconds is None else _OF_GIVEN))


def hang_settings(seconds: float | str = "auto", action: str = "end") -> HangSettings:
    """Read what was asked for: seconds, ``"auto"`` or ``"off"``.

    Raises:
        SettingError: it is none of them.
    """
    if action not in ACTIONS:
        raise SettingError("on_hang", action, "there is no such way", fix=f"choose one of {', '.join(ACTIONS)}")
    if seconds in ("auto", "off"):
        return HangSettings(None if seconds == "auto" else float("inf"), action)
    try:
        number = float("nan") if isinstance(seconds, bool) else float(seconds)
    except (TypeError, ValueError):
        number = float("nan")
    if not number > 0:
        fix = 'give seconds, such as 600, or "auto" or "off"'
        raise SettingError("hang_timeout", seconds, "it is no number of seconds above 0", fix=fix)
    return HangSettings(number, action)


class PulseFile:
    """A process's pulse in memory that another process reads.

    Args:
        path: the file; made where there is none.
    """

    _FORMAT = "<qddd20s"
    """Steps; time of the last beat or change (monotonic, which processes share); since when the activity runs; the
    limit in seconds; the activity."""

    def __init__(self, path: Path) -> None:
        size = struct.calcsize(self._FORMAT)
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            os.ftruncate(handle, size)
            self._memory = mmap.mmap(handle, size)
        finally:
            os.close(handle)

    def write(self, steps: int, last: float, since: float, limit: float, activity: str) -> None:
        """Say where the process stands."""
        struct.pack_into(self._FORMAT, self._memory, 0, steps, last, since, limit, activity.encode()[:20])

    def read(self) -> tuple[int, float, float, float, str]:
        """Where it stood when it last wrote."""
        steps, last, since, limit, activity = struct.unpack_from(self._FORMAT, self._memory)
        return steps, last, since, limit, activity.rstrip(b"\0").decode(errors="replace")


class Pulse:
    """This process's pulse; see the module."""

    def __init__(self) -> None:
        self.settings = HangSettings()
        self.steps = 0
        """Steps that have ended."""
        self.file: PulseFile | None = None
        self.fired: HangError | None = None
        """What the watch has found, while Ctrl-C is on its way to the main thread."""
        self.spans: Callable[[str], AbstractContextManager[object]] = nullcontext
        """Makes the context of an activity, in which a profiler names it."""
        self.listeners: list[Callable[[], None]] = []
        """Called after each step."""
        self._last = self._beat = time.monotonic()
        self._iterations = Iterations()
        self._numbers: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        """Of optimizers and train steps, in order of appearance."""
        self._appeared = 0
        self._took: deque[float] = deque(maxlen=32)
        self._activities: list[tuple[str, float]] = []
        self._beating = False
        self._follows = False
        self._marks: tuple[tuple[str, Callable[[], bool]], ...] = ()
        self._mark_next = 0.0

    @property
    def activity(self) -> str:
        """What runs; empty for the script's own code."""
        return self._activities[-1][0] if self._activities else ""

    @property
    def step_seconds(self) -> float:
        """How long the slowest of the newest steps took; 0 before there were any."""
        return max(self._took, default=0.0)

    @property
    def limit(self) -> float:
        """Seconds without progress that count as a hang, as of now."""
        return self.settings.limit(self._took, self.steps, self.activity)

    @property
    def silent(self) -> float:
        """Seconds since there was progress: an optimizer that stepped, or something that began or ended."""
        since = self._activities[-1][1] if self._activities else 0.0
        return time.monotonic() - max(self._last, since)

    def ask_for(self, settings: HangSettings) -> None:
        """Take these settings from now on."""
        self.settings = settings
        self._write()

    def stepped(self, who: object) -> None:
        """An optimizer or a train step has stepped: a beat, where that ends an iteration of the training."""
        number = self._numbers.get(who)
        if number is None:
            number = self._numbers[who] = self._appeared
            self._appeared += 1
        if self._iterations.stepped(number):
            self.beat()
        else:
            self._last = time.monotonic()
            self._write()

    def beat(self) -> None:
        """A step has ended."""
        now = time.monotonic()
        if self._beating:  # the first one ends no interval between steps
            self._took.append(now - self._beat)
        self._beating = True
        self._last = self._beat = now
        self.steps += 1
        self._write()
        for listener in tuple(self.listeners):
            listener()

    def progress(self) -> None:
        """What runs has made progress: a batch of an evaluation, say."""
        if self._activities and threading.current_thread() is threading.main_thread():
            self._activities[-1] = self._activities[-1][0], time.monotonic()
            self._write()

    def forgive(self) -> None:
        """Begin to count anew: the process was stopped, or somebody looks into it."""
        now = time.monotonic()
        self._last = now
        self._beating = False
        self._activities = [(what, now) for what, _ in self._activities]
        self._write()

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """What runs inside is `what`.

        Raises:
            HangError: it was found to hang, and is to raise.
        """
        if threading.current_thread() is not threading.main_thread():  # what waits for it is in the main thread
            yield
            return
        self._activities.append((what, time.monotonic()))
        self._write()
        try:
            with self.spans(what):
                yield
        except KeyboardInterrupt:
            found, self.fired = self.fired, None
            if found is not None:
                raise found from None
            raise
        finally:
            self._ended(what)

    def _ended(self, what: str) -> None:
        """What is round it has made progress."""
        if self._activities:
            self._activities.pop()
        if self._activities:
            self._activities[-1] = self._activities[-1][0], time.monotonic()
        if what in _SLACK_FOR:
            self.forgive()
        self._write()

    def each(self, what: str, items: Iterable[_Item]) -> Iterator[_Item]:
        """Walk `items`; waiting for the next one is `what`."""
        iterator = iter(items)
        while True:
            with self.busy(what):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def note_cards(self, record: Callable[[], Sequence[tuple[str, Callable[[], bool]]]]) -> None:
        """Now and then, after a step: remember what tells whether cards have finished it.

        Args:
            record: marks the end of what each card was given; its name, and whether it has come so far.
        """
        now = time.monotonic()
        if now >= self._mark_next:
            self._mark_next = now + 1.0
            if all(done() for _, done in self._marks):
                self._marks = tuple(record())

    def unfinished_cards(self) -> list[str]:
        """Cards that have not finished what they were given when `note_cards` last looked."""
        return [name for name, done in self._marks if not done()]

    def _write(self) -> None:
        if self.file is not None:
            since = self._activities[-1][1] if self._activities else self._last
            self.file.write(self.steps, max(self._last, since), since, self.limit, self.activity)

    def follow_optimizers(self) -> None:
        """Be told of every step of any optimizer, for loops that are written out."""
        if self._follows:
            return
        self._follows = True
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def note(optimizer: Any, *_: Any) -> None:
            if not any(what == "step" for what, _ in self._activities):
                self.stepped(optimizer)

        register_optimizer_step_post_hook(note)


PULSE = Pulse()
"""The pulse of this process."""
