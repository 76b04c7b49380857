"""Recording some steps of a running script with torch.profiler, and making a `Profile` of them.

Behaviour:
    * Steps are counted by the process's pulse: train steps, and steps of optimizers in loops that are written out.
    * The first `skip` steps run as ever. Then the profiler warms up for one step, and `steps` steps are recorded.
    * The cards are waited for where the first of these begins and where the last one ends, and not in between: the
      host may be many steps ahead of them, and the time of its own steps would say nothing.
    * Outside those, nothing is recorded: what is left of it is a look at a variable in each part of a step.
    * The trace is written when the last step has ended; reading it takes seconds for large models.
"""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from manycard.diagnosis.profile.breakdown import break_down
from manycard.diagnosis.profile.findings import Setup
from manycard.diagnosis.profile.others import others_at_work
from manycard.diagnosis.profile.per_card import RANK_KEY
from manycard.diagnosis.profile.result import Profile
from manycard.diagnosis.profile.trace import read_trace
from manycard.engine.driving.spans import SPAN, recording, span
from manycard.errors import SettingError
from manycard.hangs import PULSE

__all__ = ["ProfileSettings", "Recording"]

_FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}
_running: list[Recording] = []


@dataclass(frozen=True)
class ProfileSettings:
    """How much to record, and where the trace goes."""

    steps: int = 8
    skip: int = 5
    """Steps before: the first ones compile, choose algorithms and record CUDA graphs."""
    out: str | None = None
    """A folder for the trace; None for a new one under the temporary folder."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("skip", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SettingError(name, value, f"it must be a whole number of at least {least}", fix="leave it out")

    def folder(self) -> Path:
        """Where the trace goes; made where it isn't there.

        Raises:
            SettingError: it can't be made.
        """
        if self.out is None:
            return Path(tempfile.mkdtemp(prefix="manycard-profile-"))
        try:
            Path(self.out).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError("out", self.out, f"it can't be made ({error.strerror})", fix="name a folder") from error
        return Path(self.out)


class Recording:
    """Records steps of this process.

    Args:
        settings: how many.
        cards: the cards' names, asked for when the recording ends.
        setup: what is known of the run, asked for then.
        then: called with the profile.
        name: of the trace's file, without its ending.
    """

    def __init__(
        self,
        settings: ProfileSettings,
        cards: Callable[[], Sequence[str]],
        setup: Callable[[], Setup],
        then: Callable[[Profile], None],
        name: str = "trace",
    ) -> None:
        if _running:
            raise SettingError("profile", settings.steps, "steps are being profiled already", fix="end that one first")
        self._settings, self._then, self._name = settings, then, name
        self.describe(cards, setup)
        self._seen = 0
        self._profiler: torch_profile | None = None
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._hook: Any = None
        self.profile: Profile | None = None
        """What was recorded; None until the recording has ended."""

    def describe(self, cards: Callable[[], Sequence[str]], setup: Callable[[], Setup]) -> None:
        """Take this for what the run is, from now on."""
        self._cards, self._setup = cards, setup

    def start(self) -> None:
        """Begin to count steps."""
        _running.append(self)
        self._hook = register_optimizer_step_pre_hook(lambda optimizer, *_: self._optimizers.add(optimizer))
        PULSE.follow_optimizers()
        PULSE.listeners.append(self._stepped)
        if self._settings.skip == 0:
            self._warm_up()

    def _stepped(self) -> None:
        self._seen += 1
        after = self._seen - self._settings.skip
        if after >= 0 and self._profiler is None:
            self._warm_up()
        elif self._profiler is not None:
            if self._beats() in (1, self._settings.steps + 1):
                _wait_for_cards()
            _beat()
            if self._beats() > self._settings.steps:
                self.end()

    def _beats(self) -> int:
        return self._seen - max(self._settings.skip, 0)

    def _warm_up(self) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        # Without this, only the calling thread is recorded, and not those that drive the cards.
        every_thread = _ExperimentalConfig(profile_all_threads=True)
        self._profiler = torch_profile(activities=activities, experimental_config=every_thread)
        self._profiler.start()
        # Readers of traces ask for a rank; where there is a process group, torch has written it.
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            self._profiler.add_metadata_json(RANK_KEY, json.dumps({"rank": 0, "world_size": 1}))
        recording(True)
        PULSE.spans = _activity

    def end(self) -> Profile | None:
        """End now, and give what was recorded so far; None where that is nothing."""
        if self in _running:
            _running.remove(self)
            PULSE.listeners.remove(self._stepped)
            self._hook.remove()
            recording(False)
            PULSE.spans = nullcontext
            if self._profiler is not None:
                self._finish(self._profiler)
        return self.profile

    def _finish(self, profiler: torch_profile) -> None:
        _wait_for_cards()
        profiler.stop()
        self._profiler = None
        path = self._settings.folder() / f"{self._name}.json.gz"
        profiler.export_chrome_trace(str(path))
        trace = read_trace(path)
        found = break_down(trace, list(self._cards()))
        graphs = any(each.what == "replay" for each in trace.spans)
        unfused = tuple(sorted({type(o).__name__ for o in self._optimizers if not found or _is_unfused(o)}))
        setup = replace(
            self._setup(),
            graphs=graphs,
            optimizers=trace.optimizers,
            cores=_cores(),
            unfused=unfused,
            shared=others_at_work([card.card for card in found if not card.simulated]),
        )
        self.profile = Profile(tuple(found), max(len(trace.beats) - 1, 0), setup, (str(path),))
        self._then(self.profile)


def _wait_for_cards() -> None:
    """Wait for the cards that this process has used; waiting for another would take memory there."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with span("drain"):
            for device in range(torch.cuda.device_count()):
                if torch.cuda.memory_reserved(device):
                    torch.cuda.synchronize(device)


def _beat() -> None:
    with record_function(f"{SPAN}beat"):
        pass


def _activity(what: str) -> AbstractContextManager[object]:
    """What the pulse calls an activity, as a span."""
    return span(what)


def _is_unfused(optimizer: Optimizer) -> bool:
    """Whether an optimizer's parameters are on a GPU and it could use its fused kernels there, and doesn't."""
    if type(optimizer).__name__ not in _FUSED or type(optimizer).__module__.partition(".")[0] != "torch":
        return False
    groups = optimizer.param_groups
    on_card = any(parameter.is_cuda for group in groups for parameter in group["params"])
    return on_card and not any(group.get("fused") for group in groups)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
