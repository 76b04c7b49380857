"""How long a step of a candidate takes, from one card's steps, the links and the host.

    cards     forward, backward and update of the largest shard, interpolated over the sizes measured on one card
    host      launches x cost of one; one process that drives N cards can't be faster than N times the part of it that
              holds Python's interpreter lock, and N processes need N cores
    reduce    `reducing`; behind the backward pass in `dp`, hidden in part of it in `ddp`
    copies    what travels beside gradients: shards from the primary, outputs and their gradients of a drop-in
    input     a step can't be faster than its batch is loaded

Eager, cards and host work at once, and the slower sets the pace; the rest is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manycard.planner.candidates import Candidate
from manycard.planner.facts import Facts, StepPoint
from manycard.planner.reducing import all_reduce_ms, copy_ms

__all__ = ["StepParts", "card_ms", "shard_of", "step_parts"]

_BACKWARD_SHARE = 0.6
"""Of a step, the part in which reductions can hide: backward is about two thirds, and its last bucket can't hide."""
_BUCKET_MIB = 25.0
"""DDP's bucket; the last one is reduced when backward has ended."""
_BUCKET_PASSES = 4
"""Reads and writes of each gradient into and out of DDP's buckets."""
_DDP_HOST = 1.05
"""DDP's hooks and bookkeeping on the host, over a plain step."""
_REPLAY_MS = 0.02
"""What the host needs to replay one card's graphs."""
_LOSS_PASSES = 25
"""Reads and writes of an output by a loss outside the module, fp32 copies included: GPT-2's cross-entropy takes 8.6 ms
for 1.6 GB of logits on an H200."""
_MEMORY_GB_PER_S = 4000.0
"""A card's own memory, where only its order matters."""
_SHARDED_VOLUME = 1.5
"""What a fully sharded step sends over an all-reduce: parameters gathered twice, gradients scattered once."""
_MIB = 2**20


@dataclass(frozen=True)
class StepParts:
    """Where the time of one predicted step goes, in milliseconds."""

    cards_ms: float
    host_ms: float
    reduce_ms: float
    """All of it, hidden or not."""
    exposed_ms: float
    """The part of reductions that nothing hides."""
    copies_ms: float
    input_ms: float
    """What loading one global batch takes."""

    @property
    def step_ms(self) -> float:
        """The whole step."""
        return max(self.cards_ms, self.host_ms, 0.0) + self.exposed_ms + self.copies_ms

    @property
    def paced_ms(self) -> float:
        """The step with a loader that may be slower."""
        return max(self.step_ms, self.input_ms)


def step_parts(facts: Facts, candidate: Candidate) -> StepParts | None:
    """The step of a candidate; None where a figure that it needs isn't known."""
    micro = shard_of(facts, candidate)
    work = _work_ms(facts, candidate, micro)
    reduce = all_reduce_ms(facts.links, facts.model.gradients_mib, *_spread(facts, candidate))
    if work is None or reduce is None:
        return None
    if candidate.strategy == "fsdp":
        reduce *= _SHARDED_VOLUME
    host = _host_ms(facts, candidate)
    return StepParts(
        cards_ms=work,
        host_ms=host,
        reduce_ms=reduce,
        exposed_ms=_exposed_ms(facts, candidate, reduce, work),
        copies_ms=_copies_ms(facts, candidate, micro),
        input_ms=1e3 * facts.batch / facts.input_rate if facts.input_rate else 0.0,
    )


def shard_of(facts: Facts, candidate: Candidate) -> int:
    """Samples that the busiest card computes at once."""
    samples = -(-facts.batch // candidate.accumulate)
    share = max(candidate.weights) if candidate.weights else 1.0 / candidate.cards
    return max(1, -(-samples // candidate.cards) if not candidate.weights else round(samples * share))


def card_ms(points: Sequence[StepPoint], samples: float) -> float | None:
    """One card's step on `samples`, interpolated, and beyond what was measured on the line through the last two.

    Example:
        >>> card_ms([StepPoint(8, 5.0), StepPoint(16, 9.0)], 32)
        17.0
    """
    known = sorted((point.samples, point.ms) for point in points if point.ms is not None)
    if not known:
        return None
    if len(known) == 1:
        return known[0][1] * samples / known[0][0]
    after = next((place for place, (size, _) in enumerate(known) if samples <= size), len(known) - 1)
    (low, short), (high, long) = known[max(after, 1) - 1], known[max(after, 1)]
    slope = max(long - short, 0.0) / (high - low)
    return max(short + slope * (samples - low), known[0][1] * samples / known[0][0] if samples < known[0][0] else 0.0)


def _spread(facts: Facts, candidate: Candidate) -> tuple[int, int]:
    """Cards of each machine, and machines."""
    return (candidate.cards, 1) if candidate.cards <= len(facts.cards) else (len(facts.cards), facts.machines)


def _own_ms(facts: Facts, candidate: Candidate, samples: float) -> float | None:
    """One card of the primary's speed, on `samples`."""
    if candidate.compile:
        return card_ms(facts.step.compiled, samples)
    eager, graphed = card_ms(facts.step.eager, samples), card_ms(facts.step.graphed, samples)
    if graphed is None or eager is None or candidate.graphs:
        return eager if graphed is None else graphed
    # Where eager steps were measured the host may have set the pace, which says nothing of larger shards.
    return max(eager, graphed)


def _work_ms(facts: Facts, candidate: Candidate, micro: int) -> float | None:
    """The slowest card's forward, backward and update of all its parts."""
    cards, parts = facts.cards[: candidate.cards], candidate.accumulate
    if not candidate.weights:
        one = _own_ms(facts, candidate, micro)
        return None if one is None else parts * one / min(card.speed for card in cards)
    shards = [facts.batch / parts * weight for weight in candidate.weights]
    times = [_own_ms(facts, candidate, shard) for shard in shards]
    each = [(ms, card.speed) for ms, card in zip(times, cards, strict=True) if ms is not None]
    return max((parts * ms / speed for ms, speed in each), default=None)


def _host_ms(facts: Facts, candidate: Candidate) -> float:
    if candidate.graphs or candidate.compile:
        return _REPLAY_MS * (1 if candidate.ranks else candidate.cards) * candidate.accumulate
    own = (facts.step.host_ms or 0.0) * candidate.accumulate
    if candidate.ranks:
        return own * _DDP_HOST * max(1.0, len(facts.cards) / facts.cores)
    return own * max(1.0, candidate.cards * facts.step.lock_share)


def _exposed_ms(facts: Facts, candidate: Candidate, reduce: float, work: float) -> float:
    if not candidate.ranks:
        return reduce
    cards, machines = _spread(facts, candidate)
    last = all_reduce_ms(facts.links, min(_BUCKET_MIB, facts.model.gradients_mib), cards, machines) or 0.0
    hidden = _BACKWARD_SHARE * work / candidate.accumulate
    passes = _BUCKET_PASSES * facts.model.gradients_mib * _MIB / (_MEMORY_GB_PER_S * 1e6)
    return max(min(last, reduce), reduce - hidden) + passes


def _copies_ms(facts: Facts, candidate: Candidate, micro: int) -> float:
    others = candidate.cards - 1
    if not others or candidate.ranks:
        return 0.0
    model, parts = facts.model, candidate.accumulate
    shards = parts * others * copy_ms(facts.links, micro * model.input_mib)
    if not candidate.drop_in:
        return shards
    outputs = micro * model.output_mib
    travelling = 2 * others * copy_ms(facts.links, outputs) + copy_ms(facts.links, model.parameters_mib)
    loss = others * _LOSS_PASSES * outputs * _MIB / (_MEMORY_GB_PER_S * 1e6)
    return shards + travelling + loss
