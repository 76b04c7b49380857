"""Measuring what can't be read: copies compared bit by bit, bandwidths, clocks under load, NCCL.

bits     copies compared with what was sent
timing   how fast cards copy, compute and add up
request  what the process that measures is asked to do
ranks    do processes, one a card, find each other
stages   a process watched from outside, so that what hangs has a name and ends
worker   the process that measures
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from manycard.cards import in_words
from manycard.cards.choose import others_on
from manycard.diagnosis.facts import Facts
from manycard.diagnosis.measured import Measured
from manycard.diagnosis.measuring.request import STAGES, Request
from manycard.diagnosis.measuring.stages import StagedRun, run_in_stages

__all__ = ["Request", "cuda_hangs_at", "measure", "request_for", "run_request"]

_LEAST_FREE = 1536 * 1024**2
"""Free memory that measuring needs on a card: CUDA's own, NCCL's buffers, and what is copied."""
_REMEDIES = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")
"""Tried one after the other, each by itself, when NCCL doesn't start or doesn't end."""


def measure(
    facts: Facts, on_stage: Callable[[str], None] = lambda stage: None, stages: Sequence[str] = STAGES
) -> Measured:
    """Measure the chosen cards, in a process of its own; takes ten seconds to a minute.

    Args:
        facts: what was read; its chosen cards are measured, unless somebody else is on one of them.
        on_stage: called with the name of each stage.
        stages: what is measured.

    Returns:
        what was found; `Measured.left_out` where the cards can't be measured.
    """
    why_not = _why_not(facts)
    if why_not:
        return Measured(left_out=why_not)
    request = replace(request_for(facts), stages=tuple(stages))
    run = run_request(request, facts.environment, on_stage)
    helped = ""
    stuck = run.hung_at or run.failed_at
    if "NCCL" in stuck or "all-reduce" in stuck:
        helped = _what_helps(request, facts.environment, on_stage)
    return Measured.from_records(
        run.records, hung_at=run.hung_at, failed_at=run.failed_at, failure=run.failure, helped=helped
    )


def cuda_hangs_at(environment: Mapping[str, str]) -> str:
    """The stage at which a fresh process that only asks CUDA for its cards hangs; empty where it answers or fails."""
    return run_request(Request(devices=(), stages=()), environment).hung_at


def request_for(facts: Facts) -> Request:
    """What is to be measured on the chosen cards, in sizes that fit into their memory."""
    infos = [info for _, info in facts.chosen]
    least = min((info.memory_free for info in infos if info.memory_free is not None), default=16 << 30)
    whole = Request(
        devices=tuple(name for name, _ in facts.chosen),
        nvml=tuple(info.index for info in infos) if all(info.index in facts.health for info in infos) else (),
    )
    return replace(
        whole,
        copy_size=min(whole.copy_size, least // 16),
        compared=tuple(size for size in whole.compared if size <= least // 16),
        reduced=tuple(size for size in whole.reduced if size <= least // 8),
        matrix_side=whole.matrix_side if least > 4 << 30 else 2048,
    )


def run_request(
    request: Request, environment: Mapping[str, str], on_stage: Callable[[str], None] = lambda stage: None
) -> StagedRun:
    """Run the process that measures.

    Args:
        request: what to measure.
        environment: its variables; it sees no MANYCARD_* of the caller's.
        on_stage: called with the name of each stage.
    """
    variables = {name: value for name, value in environment.items() if not name.startswith("MANYCARD_")}
    root = str(Path(__file__).resolve().parents[3])
    variables["PYTHONPATH"] = os.pathsep.join(path for path in (root, variables.get("PYTHONPATH", "")) if path)
    variables["PYTHONSAFEPATH"] = "1"  # nothing in the working folder stands in for a module that is imported here
    words = [sys.executable, "-m", "manycard.diagnosis.measuring.worker", request.to_json()]
    return run_in_stages(words, variables, on_stage)


def _why_not(facts: Facts) -> str:
    if not facts.chosen:
        return "there is no GPU to measure"
    busy = [name for name, info in facts.chosen if others_on(info, facts.own_pids)]
    if busy:
        return f"{', '.join(busy)} {_is(busy)} in use by others: figures would be wrong, and their work held up"
    short = [(n, i.memory_free) for n, i in facts.chosen if i.memory_free is not None and i.memory_free < _LEAST_FREE]
    if short:
        return f"{short[0][0]} has only {in_words(short[0][1])} of free memory"
    return ""


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _what_helps(request: Request, environment: Mapping[str, str], on_stage: Callable[[str], None]) -> str:
    """The first variable with which NCCL starts and adds up, such as ``NCCL_P2P_DISABLE=1``; empty for none."""
    small = replace(request, stages=("nccl", "ranks"), reduced=(1 << 20,))
    for name in _REMEDIES:
        if name in environment:
            continue
        on_stage(f"trying {name}=1")
        run = run_request(small, {**environment, name: "1"})
        if not run.hung_at and not run.failed_at and all(record.get("right", True) for record in run.records):
            return f"{name}=1"
    return ""
