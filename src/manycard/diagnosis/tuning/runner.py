"""One trial: a fresh process that starts NCCL with some variables and times all-reduces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from manycard.diagnosis.facts import Facts
from manycard.diagnosis.measuring import request_for, run_request
from manycard.diagnosis.tuning.sweep import Times, TrialFailed

__all__ = ["DEFAULT_SIZES", "sizes_for", "trial_runner"]

DEFAULT_SIZES = (1 << 20, 25 << 20, 100 << 20, 500 << 20)
"""Bytes of gradients that are reduced in one call: a small model's, DDP's bucket, ResNet-50's and GPT-2's in fp32."""


def sizes_for(facts: Facts, wanted: Sequence[int] = DEFAULT_SIZES) -> tuple[int, ...]:
    """Those of the sizes that fit into the chosen cards' memory; at least the smallest."""
    least = min((info.memory_free for _, info in facts.chosen if info.memory_free is not None), default=16 << 30)
    return tuple(size for size in sorted(wanted) if size <= least // 8) or (min(wanted),)


def trial_runner(facts: Facts, sizes: Sequence[int]) -> Callable[[Mapping[str, str]], Times]:
    """What runs one setting on the chosen cards.

    Args:
        facts: what was read.
        sizes: bytes on each card.
    """
    request = replace(request_for(facts), stages=("nccl",), reduced=tuple(sizes))

    def run(settings: Mapping[str, str]) -> Times:
        ran = run_request(request, {**facts.environment, **settings})
        if ran.hung_at:
            raise TrialFailed(f"hangs at: {ran.hung_at}")
        if ran.failed_at:
            raise TrialFailed(ran.failure or f"fails at: {ran.failed_at}")
        if not all(record["right"] for record in ran.records):
            raise TrialFailed("wrong sums")
        return {record["size"]: record["us"] / 1e6 for record in ran.records}

    return run
