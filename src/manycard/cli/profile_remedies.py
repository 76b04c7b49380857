"""Trying what helps against fragmented memory: a profiled script's first steps again, in processes of their own.

Behaviour:
    * Only where the run has shown fragments. Each remedy is one run of ``manycard profile`` with the same words, steps
      and cards, ended after the steps; what it reserves on the worst card is compared.
    * The script has ended by then, and what this process still holds on the cards is let go of first. Where a card
      then has less free memory than the run had reserved there, nothing is tried, and the reason is given.
    * A trial that fails, or takes much longer than the run did, is a remedy that failed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

import torch

from manycard.diagnosis.memory_use import REMEDIES, Reserve, Tried
from manycard.diagnosis.memory_use.live import live_tensors

__all__ = ["VARIABLE", "allocator_setting", "is_trial", "try_remedies", "why_not_tried"]

VARIABLE = "MANYCARD_TRIED_REMEDY"
"""Set in the trials: the remedy."""
_NEW, _OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


def is_trial(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is itself a trial."""
    return VARIABLE in environment


def allocator_setting(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that asks for expandable segments, beside what it says already.

    Example:
        >>> allocator_setting({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"})
        {'PYTORCH_CUDA_ALLOC_CONF': 'max_split_size_mb:128,expandable_segments:True'}
    """
    name = _NEW if _NEW in environment else _OLD
    kept = [part for part in environment.get(name, "").split(",") if part and "expandable_segments:" not in part]
    return {name: ",".join([*kept, "expandable_segments:True"])}


def why_not_tried(reserves: Sequence[Reserve]) -> str:
    """Let go of what this process holds on the cards; then why trials can't run beside it, empty where they can."""
    _let_go()
    for reserve in reserves:
        free, _ = torch.cuda.mem_get_info(torch.device(reserve.card))
        if free < reserve.reserved:
            return f"{reserve.card} has less free memory than the run needed, since others use it"
    return ""


def _let_go() -> None:
    """Free the memory of the script's tensors: it has ended, and its `__main__` would keep them."""
    for tensor in live_tensors():
        if tensor.is_cuda:
            with contextlib.suppress(RuntimeError):  # memory that isn't its own
                tensor.untyped_storage().resize_(0)
    gc.collect()
    torch.cuda.empty_cache()


def try_remedies(words: Sequence[str], worst: str, seconds: float) -> list[Tried]:
    """Run the same steps under each remedy.

    Args:
        words: of the command line of the profile, after ``profile``; without ``--json`` and ``--whole``.
        worst: the card that is looked at.
        seconds: that a trial may take.
    """
    return [_try(remedy, words, worst, seconds) for remedy in REMEDIES]


def _try(remedy: str, words: Sequence[str], worst: str, seconds: float) -> Tried:
    environment = {**os.environ, VARIABLE: remedy}
    if remedy == "expandable":
        environment |= allocator_setting(environment)
    with tempfile.TemporaryDirectory(prefix="manycard-remedy-") as folder:
        command = [sys.executable, "-m", "manycard.cli", "profile", "--json", "--out", folder, *words]
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return Tried(remedy, failure=f"it had not ended after {seconds:.0f} s")
    with contextlib.suppress(ValueError):
        document = json.loads(done.stdout)
        found = [row["reserved"] for row in document.get("reserves", ()) if row["card"] == worst]
        if found:
            return Tried(remedy, max(found), document.get("step_ms"))
    lines = done.stderr.strip().splitlines()
    return Tried(remedy, failure=lines[-1].strip() if lines else "it gave no figures")
