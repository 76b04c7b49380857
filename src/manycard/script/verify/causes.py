"""Why many cards compute something else than one card: rules from recordings to findings.

Each rule is pure, looks for one cause and gives a `Finding` or nothing. Rules about ranks look at what ranks did
beside each other, and speak also where nothing differs: ranks that all see the same samples agree perfectly.
Where something differs and no rule knows why, that is said, with the figures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

from manycard.diagnosis.finding import SEVERITIES, Finding
from manycard.script.verify.differences import Compared
from manycard.script.verify.rank_causes import RANK_RULES, same_samples, sample_ids
from manycard.script.verify.samples import same_rows

__all__ = ["find_causes"]

_PARALLEL = 0.999
"""Cosine above which two gradients have one direction."""
_CLOSE = 0.01
"""Relative, for a ratio to count as a whole number of times."""
Rule = Callable[[Compared], "Finding | None"]


def find_causes(compared: Compared) -> list[Finding]:
    """Every cause that a rule recognises, the gravest first."""
    found = [finding for rule in _RULES if (finding := rule(compared)) is not None]
    explained = any(finding.severity != "note" or "draws" in finding.cause for finding in found)
    if compared.first is not None and not explained and not compared.not_comparable:
        found.append(_growing(compared) or _unknown(compared))
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _seeds(compared: Compared) -> Finding | None:
    if compared.first is None or compared.first.what != "initial parameters":
        return None
    return Finding(
        "the two runs start from different parameters, because the script's seed differs between them",
        f"{compared.first.name} differs by {compared.first.value:.2g} of the largest before the first update",
        "seed random, numpy and torch with a constant before the model is made, not with the time or the rank",
        "error",
    )


def _other_data(compared: Compared) -> Finding | None:
    at = compared.at
    if at is None or compared.first is None or compared.first.what != "data" or compared.inputs_follow:
        return None
    if same_samples(compared) is not None:
        return None
    one, many = compared.one.steps[at.number - 1], compared.many.steps[at.number - 1]
    sizes = f"step {at.number} has {one.samples} samples on one card and {many.samples} on many"
    if compared.not_comparable:
        return Finding(
            f"a global batch is {many.samples / max(one.samples, 1):g} times that of one rank alone",
            sizes,
            "if that is meant, the rest is what ranks do beside each other; with DistributedSampler it is comparable",
            "note",
        )
    pairs = zip(one.calls, many.calls, strict=False)
    if len(one.calls) == len(many.calls) and all(same_rows(a.rows, b.rows, ordered=False) for a, b in pairs):
        return Finding(
            "the samples of a batch come in another order",
            sizes + ", the same ones",
            "order doesn't matter to a mean over samples; fix the order to compare further",
            "warning",
        )
    apart = _rank_with_other_data(compared)
    if apart is not None:
        return apart
    ids_one, ids_many = Counter(sample_ids(compared.one.steps)), Counter(sample_ids(compared.many.steps))
    shared = (ids_one & ids_many).total() / max(ids_one.total(), 1)
    if shared > 0.5:
        return Finding(
            "samples come in another order",
            f"{sizes}; {shared:.0%} of one card's samples in all steps are also among the other's",
            "shuffle with a generator of its own and a fixed seed: torch.Generator().manual_seed(0)",
            "error",
        )
    return Finding(
        "the inputs are other ones",
        f"{sizes}; {shared:.0%} of one card's samples in all steps are among the other's",
        "draw augmentation and noise from a fixed seed that depends on the sample, not on the card, worker or time",
        "error",
    )


def _rank_with_other_data(compared: Compared) -> Finding | None:
    """One rank that has none of one card's samples, where another has."""
    known = set(sample_ids(compared.one.steps))
    shares = [_share(sample_ids(rank.steps), known) for rank in compared.ranks]
    strange = [rank for rank, share in enumerate(shares) if share < 0.1]
    if not strange or max(shares) < 0.9:
        return None
    return Finding(
        f"rank {strange[0]} has data of its own",
        f"{shares[strange[0]]:.0%} of its samples are among one card's, and {max(shares):.0%} of another rank's",
        "make the data from one seed on every rank, before parallel.setup gives ranks draws of their own",
        "error",
    )


def _learning_rate(compared: Compared) -> Finding | None:
    at = compared.at
    if at is None or compared.first is None or compared.first.what != "learning rate":
        return None
    one, many = at.rates
    shown = f"step {at.number} has {_listed(one)} on one card and {_listed(many)} on {compared.cards}"
    ratios = [b / a for a, b in zip(one, many, strict=False) if a]
    if ratios and all(_near(ratio, compared.cards) for ratio in ratios):
        return Finding(
            "the learning rate is multiplied by the number of cards",
            shown,
            "leave that out where the global batch is the same; it belongs to a batch that grows with the cards",
            "error",
        )
    times = _stepped_times(compared)
    if times:
        return Finding(
            f"the schedule moves {times} steps at a time",
            f"{shown}, which one card has in step {(at.number - 1) * times + 1}",
            "step the scheduler once an optimizer step, and count its length in optimizer steps",
            "error",
        )
    return Finding(
        "the learning rate differs", shown, "compute it from the global batch and the step, not from the rank", "error"
    )


def _stepped_times(compared: Compared) -> int:
    """How many times as fast many cards' schedule moves; 0 if that doesn't explain it."""
    one, many = ([step.rates for step in recording.steps] for recording in (compared.one, compared.many))
    for times in range(2, max(compared.cards, 4) + 1):
        places = [place for place in range(len(many)) if place * times < len(one)]
        fits = all(_all_near(one[place * times], many[place]) for place in places)
        if len(places) > 1 and fits and len({one[place * times] for place in places}) > 1:
            return times
    return 0


def _loss_is_a_sum(compared: Compared) -> Finding | None:
    ratio = _times(compared)
    if not _near(ratio, 1 / compared.cards):
        return None
    return Finding(
        "the loss is a sum over samples, where a mean is taken over cards",
        f"the gradient or loss is {ratio:.4g} times one card's on {compared.cards} cards, in the same direction",
        "divide the loss by the number of samples (reduction='mean'), or return (sum, count) to a train step",
        "error",
    )


def _added_up(compared: Compared) -> Finding | None:
    ratio = _times(compared)
    if not _near(ratio, compared.cards):
        return None
    return Finding(
        "gradients of the cards are added up, where a mean is meant",
        f"the gradient or loss is {ratio:.4g} times one card's on {compared.cards} cards, in the same direction",
        "divide the summed gradients, or the loss, by the number of cards",
        "error",
    )


def _accumulation(compared: Compared) -> Finding | None:
    at = compared.at
    if at is None:
        return None
    passes = max(map(len, at.losses))
    ratio = _times(compared)
    if passes < 2 or not (_near(ratio, passes) or _near(ratio, 1 / passes)):
        return None
    return Finding(
        "accumulated gradients are not divided by the number of micro-batches in one of the runs",
        f"the gradient is {ratio:.4g} times one card's, and {passes} backward passes lead to an update",
        "divide each loss by the number of micro-batches, once: either in the script or by accumulate=",
        "error",
    )


def _batchnorm(compared: Compared) -> Finding | None:
    if not compared.many.batchnorm or not compared.in_numbers:
        return None
    return Finding(
        "BatchNorm takes its statistics from each card's part of the batch",
        f"{', '.join(compared.many.batchnorm)} has BatchNorm in training mode; {_sizes(compared)}",
        "pass --sync-batchnorm (sync_batchnorm=True, or SyncBatchNorm under DistributedDataParallel)",
        "warning",
    )


def _draws(compared: Compared) -> Finding | None:
    if not compared.one.draws or not compared.in_numbers:
        return None
    return Finding(
        "forward draws at random (dropout, noise), and each card draws its own",
        f"the random state moves during forward; {_sizes(compared)}",
        "to compare, set dropout to 0 or draw noise outside the module; for training, different draws are right",
        "note",
    )


def _clipped_while_scaled(compared: Compared) -> Finding | None:
    for step in compared.many.steps:
        if step.scaled_clip:
            return Finding(
                "gradients are clipped while the loss scale is still in them",
                f"clipping before {step.step_at or 'the step'} saw gradients that GradScaler had not unscaled",
                "call scaler.unscale_(optimizer) before clipping",
                "warning",
            )
    return None


def _nothing_spread(compared: Compared) -> Finding | None:
    spread = compared.many.spread
    if not spread or any(report.get("spread") for report in spread):
        return None
    reasons = [str(reason) for report in spread for reason in report.get("reasons", ())]
    return Finding(
        "nothing was spread: every call ran on one card",
        "; ".join(reasons) or "no call had two samples",
        "see the reason; there is nothing here for more cards to do",
        "warning",
    )


# ---- without a cause ---------------------------------------------------------------------------------------


def _growing(compared: Compared) -> Finding | None:
    """A difference that is rounding at first and grows by and by."""
    at = compared.at
    if at is None or at.number < 4 or not compared.in_numbers:
        return None
    sizes = [max(step.loss, step.gradient.value, step.parameter.value) for step in compared.steps[: at.number]]
    jumps = [later / max(earlier, 1e-7) for earlier, later in pairwise(sizes)]
    if sizes[0] > 1e-5 or max(jumps) > 100:
        return None
    return Finding(
        "differences begin as rounding and grow from step to step: this training amplifies them",
        f"{sizes[0]:.1e} in step 1, {sizes[at.number // 2]:.1e} in step {at.number // 2 + 1},"
        f" {sizes[-1]:.1e} in step {at.number}",
        f"compare {at.number - 1} steps (--steps {at.number - 1}), or run in double precision to see them stay small",
        "note",
    )


def _unknown(compared: Compared) -> Finding:
    at, first = compared.at, compared.first
    assert first is not None, "something differs"
    if at is None:
        shown = f"one card made {len(compared.one.steps)} steps, {compared.cards} made {len(compared.many.steps)}"
        fix = "see what ends the loop: a number of batches that depends on the number of ranks, a stopping rule"
        return Finding("the runs make different numbers of steps", shown, fix, "error")
    equal = first.what == "parameter"
    cause = "the same gradients lead to different updates" if equal else "the difference has no cause known here"
    return Finding(
        cause,
        f"in step {at.number} the gradient is {at.ratio:.4g} times one card's, at a cosine of {at.cosine:.5f}",
        "look for what depends on the number of cards or on a part of the batch, near the line shown; --steps 1 repeats"
        " it quickest",
        "error",
    )


_RULES: tuple[Rule, ...] = (
    _seeds,
    *RANK_RULES,
    _other_data,
    _learning_rate,
    _loss_is_a_sum,
    _added_up,
    _accumulation,
    _batchnorm,
    _draws,
    _clipped_while_scaled,
    _nothing_spread,
)


# ---- what rules share --------------------------------------------------------------------------------------


def _times(compared: Compared) -> float:
    """How many times one card's gradient, or loss where clipping may hide that, many cards' is; NaN if no multiple."""
    at = compared.at
    if at is None or not compared.in_numbers:
        return math.nan
    if at.cosine > _PARALLEL and not _near(at.ratio, 1):
        return at.ratio
    one, many = at.losses
    ratios = [b / a for a, b in zip(one, many, strict=False) if a]
    return ratios[0] if ratios and all(_near(ratio, ratios[0]) for ratio in ratios) else math.nan


def _near(value: float, target: float) -> bool:
    return abs(value - target) <= _CLOSE * abs(target)


def _all_near(one: Sequence[float], many: Sequence[float]) -> bool:
    return len(one) == len(many) and all(abs(a - b) <= 1e-6 * abs(a) for a, b in zip(one, many, strict=True))


def _sizes(compared: Compared) -> str:
    at = compared.at
    assert at is not None, "numbers differ in a step"
    if compared.first is None or compared.inputs_follow:
        return f"in step {at.number} what one module computes for another differs first"
    return f"the first difference, in step {at.number}, is {compared.first.value:.2g}"


def _share(samples: Sequence[int], known: set[int]) -> float:
    return sum(sample in known for sample in samples) / max(len(samples), 1)


def _listed(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)
