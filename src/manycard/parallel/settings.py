"""What `Parallel` was asked for: settings checked, the command line's word put over the script's."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from manycard.cards import Card, choose_cards
from manycard.cards.nccl_settings import apply_saved, check_nccl, take_back
from manycard.diagnosis.lockstep import LockstepWatch
from manycard.errors import OptimizerError, SettingError
from manycard.hangs import PULSE, hang_settings, watch_this_process
from manycard.strategies import Splitting

__all__ = [
    "batch_settings",
    "check_clip_norm",
    "check_graphs",
    "check_scheduler",
    "choose_run_cards",
    "compile_settings",
    "lockstep_watch",
    "optimizers_in",
    "overridden",
    "reduce_dtype_for",
    "seed_all",
    "sharding_for",
    "splitting_for",
    "use_nccl_settings",
    "watch_for_hangs",
    "whole_number",
]

_SHARDING = ("single", "dp", "manual")
"""Strategies in which optimizers can be shared out over cards."""
_REDUCING = (*_SHARDING, "ddp")
"""Strategies that choose what gradients are summed in."""


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


def use_nccl_settings(nccl: str, cards: Sequence[Card]) -> None:
    """Before NCCL starts, apply what was saved for these cards, unless `nccl` is ``default``.

    Raises:
        SettingError: `nccl` is neither ``saved`` nor ``default``.
    """
    if check_nccl(nccl) == "saved":
        apply_saved(cards, speaks=os.environ.get("RANK", "0") == "0")
    else:
        take_back()  # what a launcher, which can't know the script's word, has applied


def splitting_for(strategy: str, asked: str, splitting: Splitting) -> Splitting:
    """What `strategy` is given of `splitting`: all of it in ``manual``, else nothing.

    Args:
        strategy: the strategy that runs.
        asked: the one that the script asked for.

    Raises:
        SettingError: the script splits by hand in a strategy that doesn't.
    """
    if strategy == "manual" or not splitting.given:
        return splitting
    name, value = next(iter(splitting.given.items()))
    if asked != "manual":
        problem = f"strategy {strategy!r} decides by itself what each card gets"
        raise SettingError(name, value, problem, fix=f'take strategy="manual", or leave {name} out')
    _say_left_out(strategy, ", ".join(f"{each}=" for each in splitting.given))
    return Splitting()


def _say_left_out(strategy: str, settings: str) -> None:
    """Say that a strategy from the command line has no such settings as the script gives to its own."""
    if os.environ.get("RANK", "0") == "0":
        print(f"manycard: strategy {strategy!r} leaves the script's {settings} out", file=sys.stderr)


def whole_number(setting: str, value: Any, fix: str) -> int:
    """`value`, which is a whole number of at least 1.

    Raises:
        SettingError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingError(setting, value, "it must be a whole number of at least 1", fix=fix)
    return value


def batch_settings(
    strategy: str, asked: str, accumulate: int | str, per_card_batch: int | str | None, *, sync_batchnorm: bool
) -> Any:
    """Calls of a step for one update, and the most samples that a card computes at once (None: no limit).

    Args:
        strategy: the strategy that runs.
        asked: the one that the script asked for; where another runs, what that one can't do is left out, and said.

    Raises:
        SettingError: one of them is no such number, or parts of a batch would break another setting.
    """
    if accumulate == "auto":
        accumulate, per_card_batch = 1, "auto" if per_card_batch is None else per_card_batch
    calls = whole_number("accumulate", accumulate, fix='leave it out for an update in every step, or give "auto"')
    if per_card_batch is None:
        return calls, None
    if strategy == "manual" and asked != strategy:
        _say_left_out(strategy, "per_card_batch=")
        return calls, None
    if strategy == "manual":
        problem = "in strategy 'manual' cards get different numbers of samples, bounded by each one's free memory"
        raise SettingError("per_card_batch", per_card_batch, problem, fix="take strategy='dp', or leave it out")
    if sync_batchnorm:
        raise SettingError(
            "per_card_batch",
            per_card_batch,
            "a batch in parts has no BatchNorm statistics of the whole, which sync_batchnorm=True asks for",
            fix="leave one of them out",
        )
    if per_card_batch == "auto":
        return calls, "auto"
    return calls, whole_number("per_card_batch", per_card_batch, fix='give "auto" for as many as fit')


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


def optimizers_in(given: Any, *, none: bool = False) -> list[Optimizer]:
    """The optimizers that an argument stands for: one, or several.

    Args:
        none: whether there may be none.

    Raises:
        OptimizerError: it is something else.
    """
    if isinstance(given, Optimizer):
        return [given]
    optimizers = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    wrong = next((each for each in optimizers if not isinstance(each, Optimizer)), None)
    if wrong is not None or not (optimizers or none):
        kind = f"the class {wrong.__name__}" if isinstance(wrong, type) else f"a {type(wrong).__name__}"
        problem = f"the optimizer is {kind}, no torch.optim.Optimizer" if optimizers else "there is no optimizer"
        raise OptimizerError(problem, fix="make one, such as torch.optim.AdamW(model.parameters())")
    return optimizers


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


def sharding_for(strategy: str, asked: str, shard_optimizer: bool) -> bool:
    """Whether optimizers are shared out over the cards.

    Args:
        strategy: the strategy that runs.
        asked: the one that the script asked for; where that one can share state out and the other can't, it is left
            out, and said: the training is the same.

    Raises:
        SettingError: the strategy that the script asked for can't.
    """
    if not shard_optimizer or strategy in _SHARDING:
        return shard_optimizer
    if asked not in (*_SHARDING, "auto"):
        raise SettingError(
            "shard_optimizer",
            shard_optimizer,
            f"strategy {asked!r} does not share state out",
            fix="take strategy='dp', or leave it out",
        )
    _say_left_out(strategy, "shard_optimizer=")
    return False


def reduce_dtype_for(strategy: str, asked: str, reduce_dtype: str | None) -> torch.dtype | None:
    """What gradients are summed in; None for their own dtype.

    Args:
        strategy: the strategy that runs.
        asked: the one that the script asked for; where that one has a choice and the other has none, it is left out,
            and said.

    Raises:
        SettingError: there is no such choice, or the strategy that the script asked for has none.
    """
    if reduce_dtype is None:
        return None
    if reduce_dtype != "bf16":
        raise SettingError("reduce_dtype", reduce_dtype, "it is not bf16", fix="leave it out for the gradients' own")
    if strategy in _REDUCING:
        return torch.bfloat16
    if asked not in (*_REDUCING, "auto"):
        raise SettingError(
            "reduce_dtype", reduce_dtype, f"strategy {asked!r} sums gradients as they are", fix="take strategy='dp'"
        )
    _say_left_out(strategy, "reduce_dtype=")
    return None


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
