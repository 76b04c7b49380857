"""What the cards of a run do unequally, in words.

The last samples are averaged. A card on which a kernel of NCCL's waits for another counts as used, so that power tells
more than use where both are known.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from manycard.cards import in_words
from manycard.diagnosis.live.sample import CardSample, JobSample, Sample
from manycard.diagnosis.probes.contexts import extra_contexts

__all__ = ["imbalance"]

_BUSY = 10
"""Percent of use from which a card takes part."""
_USE_APART = 20
"""Points of use."""
_POWER_APART = 0.25
_MEMORY_APART = 0.15
"""Of a card's memory."""
_CPU_APART = 0.35
_LEAST_SAMPLES = 2


def imbalance(samples: Sequence[Sample], last: int = 30) -> list[str]:
    """Sentences about what is unequal over the last samples; empty where all is even or too little is known.

    Args:
        samples: the oldest first.
        last: how many of them count.
    """
    samples = samples[-last:]
    if len(samples) < _LEAST_SAMPLES:
        return []
    named = {card.name: card for sample in samples for card in sample.cards}
    use = _means(samples, lambda card: card.use)
    part = [name for name in named if use.get(name, 0) >= _BUSY]
    found = []
    if len(part) > 1:
        found += _use(part, use) or _power(part, _means(samples, lambda card: card.power))
        found += _memory(part, _means(samples, lambda card: card.memory_used), named)
        found += _held_back(part, samples)
    found += _idle(part, use, samples) + _contexts(samples[-1])
    return found + [line for job in samples[-1].jobs for line in _ranks(job, samples)]


def _means(samples: Sequence[Sample], read: Callable[[CardSample], float | None]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for sample in samples:
        for card in sample.cards:
            value = read(card)
            if value is not None:
                values.setdefault(card.name, []).append(value)
    return {name: statistics.fmean(each) for name, each in values.items()}


def _ends(part: Sequence[str], values: dict[str, float]) -> tuple[str, str]:
    known = [name for name in part if name in values]
    return min(known, key=lambda name: values[name]), max(known, key=lambda name: values[name])


def _use(part: Sequence[str], use: dict[str, float]) -> list[str]:
    low, high = _ends(part, use)
    if use[high] - use[low] < _USE_APART:
        return []
    return [f"{low} is used {use[low]:.0f} % of the time and {high} {use[high]:.0f} %: {low} waits, or gets less work"]


def _power(part: Sequence[str], power: dict[str, float]) -> list[str]:
    if len([name for name in part if name in power]) < 2:
        return []
    low, high = _ends(part, power)
    if power[low] > (1 - _POWER_APART) * power[high]:
        return []
    return [
        f"{low} draws {power[low]:.0f} W and {high} {power[high]:.0f} W: {low} waits for {high} inside NCCL, or "
        "computes less"
    ]


def _memory(part: Sequence[str], memory: dict[str, float], named: dict[str, CardSample]) -> list[str]:
    if len([name for name in part if name in memory]) < 2:
        return []
    low, high = _ends(part, memory)
    apart = memory[high] - memory[low]
    total = named[high].memory_total
    if not total or apart < _MEMORY_APART * total:
        return []
    return [
        f"{high} holds {in_words(int(memory[high]))} and {low} {in_words(int(memory[low]))}: outputs, losses or "
        f"checkpoints may be gathered on {high}"
    ]


def _held_back(part: Sequence[str], samples: Sequence[Sample]) -> list[str]:
    hot = {"heat (hardware)", "heat (software)", "power brake", "hardware slowdown"}
    held = {
        card.name: sorted(hot & set(card.reasons))[0]
        for sample in samples
        for card in sample.cards
        if card.name in part and hot & set(card.reasons)
    }
    return [f"{name} is held back ({reason}), and the others wait for it" for name, reason in held.items()]


def _idle(part: Sequence[str], use: dict[str, float], samples: Sequence[Sample]) -> list[str]:
    if not part:
        return []
    # Only of cards that the run itself has memory on: others may be meant to be free.
    mine = {name for job in samples[-1].jobs for name in job.cards}
    idle = sorted(name for name in mine - set(part) if name in use)
    return [f"{', '.join(idle)} {'has' if len(idle) == 1 else 'have'} nothing to do while others work"] if idle else []


def _contexts(sample: Sample) -> list[str]:
    on = {card.name: [(each.pid, each.memory or 0) for each in card.processes or ()] for card in sample.cards}
    return [
        f"{card} also holds {in_words(sum(memory for _, memory in extra))} of processes at work on other cards (pid "
        f"{', '.join(str(pid) for pid, _ in extra[:4])}): set_device came too late, or a checkpoint was loaded without "
        "map_location"
        for card, extra in extra_contexts(on).items()
    ]


def _ranks(job: JobSample, samples: Sequence[Sample]) -> list[str]:
    """Ranks on the CPU whose use of it differs."""
    if job.cards:
        return []
    spent: dict[int, list[float]] = {}
    for sample in samples:
        for each in sample.jobs:
            for process in each.processes if each.pid == job.pid else ():
                if process.rank is not None and process.cpu is not None:
                    spent.setdefault(process.rank, []).append(process.cpu)
    means = {rank: statistics.fmean(values) for rank, values in spent.items()}
    if len(means) < 2:
        return []
    low, high = min(means, key=lambda rank: means[rank]), max(means, key=lambda rank: means[rank])
    if means[high] < _BUSY or means[low] > (1 - _CPU_APART) * means[high]:
        return []
    return [f"rank {low} of {job.pid} takes {means[low]:.0f} % of a core and rank {high} {means[high]:.0f} %"]
