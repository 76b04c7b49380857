"""Mistakes that show in what ranks did beside each other: the rules of `manycard.script.verify.causes` about them.

They speak also where one card and many agree: ranks that all see the same samples agree perfectly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import torch

from manycard.diagnosis.finding import Finding
from manycard.script.verify.differences import Compared
from manycard.script.verify.recording import Recording, StepRecord

__all__ = ["RANK_RULES", "same_samples", "sample_ids"]


def _ranks_start_apart(compared: Compared) -> Finding | None:
    for rank, recording in enumerate(compared.ranks[1:], start=1):
        place = _unequal(compared.ranks[0], recording, "before")
        if place is not None:
            return Finding(
                "ranks start from different parameters",
                f"{_name(compared, *place)} differs between rank 0 and rank {rank} before the first update",
                "wrap the model in DistributedDataParallel, which sends rank 0's, or give every rank the same seed"
                " while the model is made",
                "error",
            )
    return None


def _not_reduced(compared: Compared) -> Finding | None:
    for rank, recording in enumerate(compared.ranks[1:], start=1):
        place = _unequal(compared.ranks[0], recording, "gradients")
        if place is not None:
            return Finding(
                "ranks update with gradients of their own, which were not averaged",
                f"in step {place[0] + 1} the gradient of {_name(compared, *place)} differs between rank 0 and rank"
                f" {rank}",
                "call the DistributedDataParallel module itself (not model.module, not under no_sync for the last"
                " micro-batch before step), and wrap every module that is trained",
                "error",
            )
    return None


def _parameters_apart(compared: Compared) -> Finding | None:
    if _not_reduced(compared) is not None or _ranks_start_apart(compared) is not None:
        return None
    for rank, recording in enumerate(compared.ranks[1:], start=1):
        place = _unequal(compared.ranks[0], recording, "parameters")
        if place is not None:
            return Finding(
                "ranks end up with different parameters from equal gradients",
                f"after step {place[0] + 1}, {_name(compared, *place)} differs between rank 0 and rank {rank}",
                "change parameters through the optimizer alone, with the same settings on every rank",
                "error",
            )
    return None


def same_samples(compared: Compared) -> Finding | None:
    """Ranks that work on the same samples."""
    if len(compared.ranks) < 2 or compared.many.in_lockstep:
        return None
    for epoch, steps in _epochs(compared.ranks).items():
        sets = [set(sample_ids(of)) for of in steps]
        rows = [sample_ids(of) for of in steps]
        natural = 1 - len(sets[0]) / max(len(rows[0]), 1)  # a set of data may hold equal samples
        for rank, other in enumerate(sets[1:], start=1):
            shared = len(sets[0] & other) / max(min(len(sets[0]), len(other)), 1)
            same_order = rows[0] == rows[rank] and len(sets[0]) > 1
            # Where the data itself repeats, only one and the same order tells.
            if same_order or (natural < 0.1 and shared > natural + 0.1):
                order = "in the same order" if same_order else "in another order"
                return Finding(
                    "ranks train on the same samples, so that cards repeat each other's work",
                    f"{shared:.0%} of rank {rank}'s samples in walk {epoch} of the loader are also rank 0's, {order}",
                    "give the loader sampler=DistributedSampler(dataset), and shuffle there, not in the loader",
                    "error",
                )
    return None


def _same_order(compared: Compared) -> Finding | None:
    """Epochs in one and the same order, though a sampler shuffles."""
    if not compared.many.shuffles:
        return None
    walks = [sample_ids(steps[0]) for steps in _epochs(compared.ranks[:1]).values()]
    walks = [walk for walk in walks if len(set(walk)) > 1]
    for first, second in pairwise(walks):
        common = min(len(first), len(second))
        if len(set(first[:common])) > 1 and first[:common] == second[:common]:
            return Finding(
                "every epoch goes through the samples in the same order",
                f"the first {common} samples of two epochs on rank 0 are the same, though DistributedSampler shuffles",
                "call sampler.set_epoch(epoch) at the start of each epoch",
                "warning",
            )
    return None


def _padding(compared: Compared) -> Finding | None:
    if compared.many.padding <= 0 or len(compared.ranks) < 2:
        return None
    return Finding(
        "some samples are used twice in each epoch",
        f"DistributedSampler repeats {compared.many.padding} of them, to give {len(compared.ranks)} ranks as many each",
        "pass drop_last=True to leave them out, or use parallel.loader, which uses each sample once",
        "note",
    )


def _uneven(compared: Compared) -> Finding | None:
    """Shards of different sizes whose means were averaged as if they were equal."""
    at = compared.at
    if at is None or len(compared.ranks) < 2 or not at.same_data or compared.one.uses_manycard:
        return None
    sizes = [rank.steps[at.number - 1].samples for rank in compared.ranks]
    if len(set(sizes)) < 2 or not compared.in_numbers:
        return None
    return Finding(
        "ranks have different numbers of samples, and their means are averaged as if these were equal",
        f"in step {at.number} ranks have {', '.join(map(str, sizes))} samples; the gradient is {at.ratio:.4g} times one"
        f" card's, at a cosine of {at.cosine:.4f}",
        "let the sampler give ranks as many (drop_last=True), or multiply each loss by samples * ranks / all samples",
        "error",
    )


def sample_ids(steps: Sequence[StepRecord]) -> list[int]:
    """The samples of each step's first call, in order."""
    return [sample for step in steps if step.calls for sample in step.calls[0].rows.ids()]


def _unequal(first: Recording, other: Recording, field: str) -> tuple[int, int] | None:
    """The first step and parameter in which two ranks differ beyond rounding."""
    for number, (one, two) in enumerate(zip(first.steps, other.steps, strict=False)):
        for place, (a, b) in enumerate(zip(getattr(one, field), getattr(two, field), strict=False)):
            if a is None or b is None:
                if a is not b:
                    return number, place
            elif a.shape != b.shape or not torch.allclose(a, b, rtol=1e-5, atol=1e-7, equal_nan=True):
                return number, place
    return None


def _name(compared: Compared, step: int, place: int) -> str:
    optimizer = compared.ranks[0].steps[step].optimizer
    names = compared.ranks[0].optimizers[optimizer].names
    return names[place] if place < len(names) else f"parameter {place}"


def _epochs(ranks: Sequence[Recording]) -> dict[int, list[list[StepRecord]]]:
    """For each walk of a loader, each rank's steps in it."""
    epochs: dict[int, list[list[StepRecord]]] = defaultdict(lambda: [[] for _ in ranks])
    for rank, recording in enumerate(ranks):
        for step in recording.steps:
            epochs[step.epoch][rank].append(step)
    return dict(epochs)


RANK_RULES = (
    _ranks_start_apart,
    _not_reduced,
    _parameters_apart,
    same_samples,
    _same_order,
    _padding,
    _uneven,
)
"""Each gives a finding or nothing."""
