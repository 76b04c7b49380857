"""What is run under every strategy, in this process or once on ranks, and what each run gives back.

A run is a function of `Make`, which makes a `Parallel` of the strategy and cards under test, and of a folder that
all ranks share. It returns plain data. The tests compare that with `reference`.
"""

from __future__ import annotations

import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..cases import CASES
from .loading import evaluate, loaded_samples, own_loader
from .losses import LOSSES, check_disturbs_nothing, loss_check
from .making import Make, Run
from .precisions import clipped_update, converge, draws, overflow, summed_in
from .resuming import resume
from .training import train_by_loop, train_by_step

__all__ = ["FP32_CARDS", "RUNS", "Make", "Run", "attempt", "rank_runs"]


def _table() -> dict[str, Run]:
    runs: dict[str, Run] = {}
    for case in CASES:
        for dtype in (torch.float64, torch.float32):
            runs[f"step/{case.name}/{dtype}"] = partial(train_by_step, case, dtype)
            if case.in_explicit_loop:
                runs[f"loop/{case.name}/{dtype}"] = partial(train_by_loop, case, dtype)
    for samples, batch_size in ((24, 8), (25, 8), (7, 3), (3, 8), (2, 1), (1, 4)):
        for shuffle in (False, True):
            runs[f"evaluate/{samples}/{batch_size}/{shuffle}"] = partial(evaluate, samples, batch_size, shuffle)
        for drop_last in (False, True):
            runs[f"loaded/{samples}/{batch_size}/{drop_last}"] = partial(loaded_samples, samples, batch_size, drop_last)
    runs |= {f"loss/{name}": partial(loss_check, name) for name in LOSSES}
    for precision in ("fp32", "bf16", "fp16"):
        for mode in ("step", "loop"):
            runs[f"converge/{precision}/{mode}"] = partial(converge, precision, mode)
            for clip in (0.05, 1e3):
                runs[f"clipped/{precision}/{clip}/{mode}"] = partial(clipped_update, precision, clip, mode)
    runs |= {f"summed in {dtype}": partial(summed_in, dtype) for dtype in (None, "bf16")}
    runs |= {f"overflow/{accumulate}": partial(overflow, accumulate) for accumulate in (1, 2)}
    runs |= {"resume": resume, "check_disturbs_nothing": check_disturbs_nothing, "draws": draws}
    return runs | {"own_loader": own_loader}


RUNS: dict[str, Run] = _table()
FP32_CARDS = 3
"""On how many cards cases run in fp32 as well: what depends on the number, fp64 shows on each."""


def rank_runs(ranks: int) -> list[str]:
    """What so many ranks run: all, but for cases in fp32, of which `FP32_CARDS` ranks run those that take steps."""
    return [name for name in RUNS if not name.endswith("float32") or (ranks == FP32_CARDS and name.startswith("step/"))]


def attempt(run: Run, make: Make, folder: Path) -> Any:
    """What a run gives back; its traceback where it fails, so that others can run after it."""
    try:
        return run(make, folder)
    except Exception:
        return traceback.format_exc()
