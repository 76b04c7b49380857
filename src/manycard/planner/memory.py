"""What a candidate holds on its fullest card, from one card's measured peak.

One card's peak over its samples is a line: what the model and its optimizer hold, and activations. A strategy adds to
it: buckets of gradients (`dp`, `ddp`), the other cards' shards where a batch arrives on the primary (`dp`), outputs of
all cards and what a loss makes of them (drop-in); a sharded one takes away what other cards hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from manycard.planner.candidates import Candidate
from manycard.planner.facts import Facts, StepPoint
from manycard.planner.step_time import shard_of

__all__ = ["MARGIN", "capacity_mib", "fixed_mib", "in_parts_that_fit", "memory_mib"]

MARGIN = 0.05
"""The part of a card's memory that stays free: the allocator's gaps, NCCL's buffers, a longer batch."""
_LOSS_COPIES = 4
"""Sizes of an output that a loss outside the module holds for it: log-probabilities and their gradient in fp32."""


def fixed_mib(facts: Facts) -> float:
    """What the model and its optimizer hold whatever the batch: parameters, gradients, state."""
    return facts.model.parameters_mib + facts.model.gradients_mib + facts.model.state_mib


def capacity_mib(facts: Facts) -> float | None:
    """What training may take of the smallest card; None where no card says."""
    known = [card.memory_mib for card in facts.cards if card.memory_mib is not None]
    return (1 - MARGIN) * min(known) if known else None


def memory_mib(facts: Facts, candidate: Candidate) -> float | None:
    """The peak of the fullest card; None where one card's peak isn't known."""
    micro = shard_of(facts, candidate)
    own = _graphed_points(facts, candidate)
    line = _line(facts, own or facts.step.eager)
    if line is None:
        return None
    added = _arriving(facts, candidate, micro) if own else _added(facts, candidate, micro)
    return line[0] + line[1] * micro + added


def in_parts_that_fit(facts: Facts, candidate: Candidate) -> Candidate | None:
    """The candidate with as few parts of a global batch as its memory needs; None where not even one sample fits.

    A candidate whose memory isn't known is left as it is.
    """
    room = capacity_mib(facts)
    while True:
        needed = memory_mib(facts, candidate)
        if room is None or needed is None or needed <= room:
            return candidate
        if shard_of(facts, candidate) == 1:
            return None
        candidate = replace(candidate, accumulate=2 * candidate.accumulate)


def _added(facts: Facts, candidate: Candidate, micro: int) -> float:
    """What a candidate holds over one card's plain step."""
    model, others = facts.model, candidate.cards - 1
    if candidate.strategy == "fsdp":
        return -fixed_mib(facts) * others / candidate.cards + 2 * model.largest_part_mib
    if candidate.strategy == "ddp":
        return model.gradients_mib
    if candidate.strategy == "single":
        return 0.0
    arriving = _arriving(facts, candidate, micro)
    if candidate.drop_in:
        outputs = micro * model.output_mib
        return arriving + candidate.cards * outputs + others * _LOSS_COPIES * outputs
    static = micro * model.input_mib if candidate.graphs else 0.0
    return model.gradients_mib + arriving + static


def _arriving(facts: Facts, candidate: Candidate, micro: int) -> float:
    """The other cards' shards: a global batch arrives on the primary."""
    return (candidate.cards - 1) * candidate.accumulate * micro * facts.model.input_mib


def _graphed_points(facts: Facts, candidate: Candidate) -> tuple[StepPoint, ...]:
    """Steps of one card as the candidate's cards make them, buckets and graphs' pools included, where measured."""
    if facts.step.stated or candidate.drop_in or not candidate.graphs:
        return ()
    points = facts.step.compiled if candidate.compile else facts.step.graphed
    return points if any(point.peak_mib is not None for point in points) else ()


def _line(facts: Facts, points: Sequence[StepPoint]) -> tuple[float, float] | None:
    """Peak of no samples, and of each: a line through the two largest sizes that were measured."""
    known = sorted((point.samples, point.peak_mib) for point in points if point.peak_mib is not None)
    if not known:
        return None
    if len(known) == 1:
        base = min(fixed_mib(facts), known[0][1])
        return base, (known[0][1] - base) / known[0][0]
    (low, small), (high, large) = known[-2:]
    slope = max(large - small, 0.0) / (high - low)
    return large - slope * high, slope
