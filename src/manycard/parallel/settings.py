"""What `Parallel` was asked for: settings checked, the command line's word put over the script's."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from manycard.cards import Card, choose_cards
from manycard.diagnosis.lockstep import LockstepWatch
from manycard.errors import SettingError
from manycard.hangs import PULSE, hang_settings, watch_this_process

__all__ = [
    "check_clip_norm",
    "check_graphs",
    "check_scheduler",
    "choose_run_cards",
    "compile_settings",
    "lockstep_watch",
    "overridden",
    "seed_all",
    "watch_for_hangs",
    "whole_number",
]


def overridden(variable: str, setting: str, value: Any) -> Any:
    """The setting's value, or the one that ``manycard run`` was given on the command line."""
    given = os.environ.get(variable)
    if given is None:
        return value
    if str(value) != given and os.environ.get("RANK", "0") == "0" and variable != "MANYCARD_CARDS":
        print(f"manycard: {setting}={given!r} from the command line replaces {value!r} in the script", file=sys.stderr)
    return given


def choose_run_cards(spec: Any) -> tuple[Card, ...]:
    """The cards that `spec` means on this machine, a simulated one for each of its ranks; says what it left out."""
    choice = choose_cards(spec)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if choice.cards[0].simulated and len(choice.cards) < local:
        choice = choose_cards(f"cpu:{local}")
    elif os.environ.get("RANK", "0") == "0":
        # A card that a list or a count doesn't name is left out by the user's own word.
        said = choice.describe() if str(spec).startswith(("all", "auto")) else "\n".join(choice.said)
        print(*[said] if said else [], file=sys.stderr, end="\n" if said else "")
    return choice.cards


def whole_number(setting: str, value: int, fix: str) -> int:
    """`value`, which is a whole number of at least 1.

    Raises:
        SettingError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingError(setting, value, "it must be a whole number of at least 1", fix=fix)
    return value


def seed_all(seed: int) -> None:
    """Seed ``random``, NumPy and PyTorch.

    Raises:
        SettingError: NumPy can't take this seed.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise SettingError("seed", seed, "it must be a whole number from 0 to 2**32 - 1", fix="give seed=0, say")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def check_clip_norm(clip_norm: float | None) -> None:
    """Check a train step's `clip_norm`.

    Raises:
        SettingError: it is not above 0.
    """
    if clip_norm is not None and not clip_norm > 0:
        raise SettingError("clip_norm", clip_norm, "it must be above 0", fix="leave it out for no clipping")


def check_graphs(graphs: str) -> str:
    """A train step's `graphs`.

    Raises:
        SettingError: it is none of the three words.
    """
    if graphs not in ("auto", "on", "off"):
        raise SettingError("graphs", graphs, "it is none of auto, on and off", fix='leave it at "auto"')
    return graphs


def compile_settings(value: bool | Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of ``torch.compile`` that `compile` stands for; None for no compilation.

    Raises:
        SettingError: it is neither a bool nor a dict.
    """
    if isinstance(value, bool):
        return {} if value else None
    if isinstance(value, Mapping):
        return dict(value)
    raise SettingError(
        "compile", value, "it is neither True nor arguments", fix='give compile={"mode": "default"}, say'
    )


def lockstep_watch(every: int | None) -> LockstepWatch | None:
    """What compares cards and ranks every so many updates; None for never.

    Raises:
        SettingError: it is no whole number of at least 1.
    """
    if every is None:
        return None
    return LockstepWatch(whole_number("check_every", every, fix="give check_every=100, or leave it out"))


def watch_for_hangs(timeout: float | str, action: str) -> None:
    """Watch this process from now on, as the script or the command line asks.

    Raises:
        SettingError: a setting has a value that can't work.
    """
    hang_settings(timeout, action)  # the script's own, even if the command line's win
    PULSE.ask_for(hang_settings(os.environ.get("MANYCARD_HANG_TIMEOUT", timeout), action))
    watch_this_process()


def check_scheduler(scheduler: Any) -> None:
    """Check that a train step can step `scheduler` after each update.

    Raises:
        SettingError: it can't.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        problem, fix = "it steps on a metric, which a train step doesn't have", "call scheduler.step(metric) yourself"
    elif scheduler is not None and not callable(getattr(scheduler, "step", None)):
        problem, fix = "it has no step()", "give one scheduler; torch's ChainedScheduler joins several"
    else:
        return
    raise SettingError("scheduler", scheduler, problem, fix=fix)
