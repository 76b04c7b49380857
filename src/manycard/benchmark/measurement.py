"""What one row of a benchmark found out.

Figures:
    * ``samples_per_s`` counts samples of the global batches in the steady steps, all cards together: the median of
      blocks of steps in one round, and the median of rounds.
    * ``spread`` is the smallest and the largest of rounds; with one round the quartiles of its blocks. ``noise`` is
      half its width over ``samples_per_s``.
    * ``speedup`` is ``samples_per_s`` over that of the ``single`` row with the same workload and settings, as far as
      ``single`` has them; ``efficiency`` is speed-up / cards. In weak scaling the cards together do more work than
      the one; in strong scaling they share the same.
    * ``first_step_s`` is the time from the start of the row's process to the end of its first step.
    * ``peak_memory_mib`` is the most that torch's allocator held on each card during the steady steps, and
      ``reserved_memory_mib`` the most that it took from the card, in which the activations of CUDA graphs are. The CUDA
      context and NCCL's own buffers are in neither. Both are None for a simulated card: simulated cards share one
      process's memory, and no part of it can be said to be one card's.
    * ``balance`` is mean / largest of the cards' peak memory: 1.0 when all hold the same, 0.55 when one of two
      holds ten times what the other does.
    * ``joules_per_sample`` is what the row's cards drew in the steady steps, over their samples.
    * ``largest_loss_difference`` is the largest ``|loss - single's| / |single's|`` over the steps both ran; None
      unless both had the same global batches.
    * ``findings`` say what holds a row back whose efficiency is under `EFFICIENT`, the biggest gain first: cause,
      evidence, fix, severity and ``gain``, up to how many times as fast. Empty where nothing was found, None where
      nothing was looked for.
    * A row that could not be measured has ``error`` set and None for its figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import median
from typing import Any

from manycard.benchmark.axes import AXES
from manycard.benchmark.meter import Figures

__all__ = [
    "EFFICIENT",
    "Measurement",
    "balance_of",
    "compare_with_single",
    "finite",
    "found_by",
    "largest_difference",
    "median_of",
    "single_of",
]

EFFICIENT = 0.9
"""The efficiency from which nothing is said of what holds a row back."""


@dataclass(frozen=True)
class Measurement:
    """One row: what was run, and what came out."""

    workload: str
    unit: str
    """What one sample is, in the plural."""
    strategy: str
    cards: int
    card_names: tuple[str, ...]
    simulated: bool
    """Whether the CPU played the cards, so that speed says nothing."""
    scaling: str
    """``weak``: the batch a card is fixed; ``strong``: the global batch is."""
    batch: int | None
    """Samples in the global batch; None where a script's first step was never reached."""
    per_card_batch: int | None
    """Samples in the largest shard."""
    precision: str
    settings: dict[str, Any] = field(default_factory=dict)
    """What ``--set`` gave this row."""
    samples_per_s: float | None = None
    spread: tuple[float, ...] = ()
    noise: float | None = None
    step_ms: float | None = None
    speedup: float | None = None
    efficiency: float | None = None
    first_step_s: float | None = None
    warm_up_steps: int | None = None
    """Steps before the steady ones."""
    steps: int | None = None
    """Steady steps, of all rounds."""
    steady: bool | None = None
    """Whether the step times had settled."""
    peak_memory_mib: tuple[float | None, ...] = ()
    reserved_memory_mib: tuple[float | None, ...] = ()
    balance: float | None = None
    shares: tuple[float, ...] | None = None
    """Each card's part of a batch at the end, where the strategy cuts by weights."""
    joules_per_sample: float | None = None
    losses: tuple[float | None, ...] = ()
    """The mean over the global batch of every step, the warm-up included; None where it was not finite."""
    final_loss: float | None = None
    accuracy: float | None = None
    largest_loss_difference: float | None = None
    timeline: dict[str, Any] | None = None
    """Of a pipeline: where the cards' time went in one step (`Timeline.as_dict`)."""
    repeats: int = 0
    """Rounds that the figures are the medians of."""
    findings: tuple[dict[str, Any], ...] | None = None
    """What holds the row back; None where it was not looked for."""
    samples_per_s_rounds: tuple[float, ...] = ()
    note: str | None = None
    """What to know about this row."""
    error: str | None = None
    """Why the row could not be measured, in one line."""
    trace: str | None = None
    """The traceback, or the end of what the row's process wrote, where there is an error."""

    def to_row(self) -> dict[str, Any]:
        """The row as JSON has it."""
        row = asdict(self)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in row.items()}

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Measurement:
        """The opposite of `to_row`."""
        known = {each.name for each in fields(cls)}
        values: dict[str, Any] = {key: value for key, value in row.items() if key in known}
        lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
        return cls(**values | lists)


def found_by(figures: Figures, *, simulated: bool) -> dict[str, Any]:
    """What a meter's figures fill in."""
    nothing = (None,) * len(figures.peaks)
    return {
        "samples_per_s": figures.samples_per_s,
        "spread": figures.quartiles,
        "noise": _noise(figures.samples_per_s, figures.quartiles),
        "step_ms": figures.step_ms,
        "first_step_s": figures.first_step_s,
        "warm_up_steps": figures.warm_up_steps,
        "steps": figures.steps,
        "steady": figures.steady,
        "peak_memory_mib": nothing if simulated else figures.peaks,
        "reserved_memory_mib": nothing if simulated else figures.reserved,
        "balance": None if simulated else balance_of(figures.peaks),
        "joules_per_sample": figures.joules_per_sample,
        "samples_per_s_rounds": (figures.samples_per_s,),
        "repeats": 1,
    }


def balance_of(peaks: Sequence[float | None]) -> float | None:
    """Mean / largest of the cards' peak memory; None when it isn't known for every card.

    Example:
        >>> balance_of([100.0, 100.0]), balance_of([200.0, 100.0]), balance_of([None, None])
        (1.0, 0.75, None)
    """
    known = [peak for peak in peaks if peak is not None]
    if not known or len(known) < len(peaks) or max(known) == 0:
        return None
    return sum(known) / len(known) / max(known)


def largest_difference(losses: Sequence[float | None], reference: Sequence[float | None]) -> float | None:
    """The largest relative difference over the steps that both have; None when no step can be compared.

    A loss that is finite in one and not in the other differs infinitely, which JSON can't say: that gives None
    too, and the row's losses show it.

    Example:
        >>> largest_difference([1.0, 2.2], [1.0, 2.0, 3.0])
        0.10000000000000009
    """
    differences = []
    for loss, expected in zip(losses, reference, strict=False):
        if loss is None or expected is None:
            return None
        differences.append(abs(loss - expected) / max(abs(expected), 1e-12))
    return max(differences, default=None)


def median_of(rounds: Sequence[Measurement]) -> Measurement:
    """One row from several rounds of it: medians of time and memory, the losses of the first round.

    A failed round keeps its error in the row, beside the figures of the rounds that worked.
    """
    worked = [row for row in rounds if row.error is None]
    failed = next((row for row in rounds if row.error is not None), None)
    if not worked:
        return rounds[0]
    first = worked[0]
    peaks = tuple(_median(column) for column in zip(*(row.peak_memory_mib for row in worked), strict=True))
    reserved = tuple(_median(column) for column in zip(*(row.reserved_memory_mib for row in worked), strict=True))
    speeds = tuple(row.samples_per_s for row in worked if row.samples_per_s is not None)
    speed = _median(speeds)
    spread = (min(speeds), max(speeds)) if len(speeds) > 1 else first.spread
    return replace(
        first,
        samples_per_s=speed,
        spread=spread,
        noise=_noise(speed, spread),
        step_ms=_median([row.step_ms for row in worked]),
        first_step_s=_median([row.first_step_s for row in worked]),
        steps=sum(row.steps or 0 for row in worked) or None,
        steady=all(row.steady is not False for row in worked) if first.steady is not None else None,
        peak_memory_mib=peaks,
        reserved_memory_mib=reserved,
        balance=balance_of(peaks),
        joules_per_sample=_median([row.joules_per_sample for row in worked]),
        repeats=len(worked),
        findings=next((row.findings for row in reversed(worked) if row.findings is not None), None),
        samples_per_s_rounds=speeds,
        error=failed.error if failed is not None else None,
        trace=failed.trace if failed is not None else None,
    )


def compare_with_single(rows: Sequence[Measurement]) -> list[Measurement]:
    """Fill in speed-up, efficiency and loss differences from the ``single`` row of each workload and setting.

    Findings of a row that turns out to be efficient are dropped.
    """
    return [_compared(row, single_of(row, rows)) for row in rows]


def single_of(row: Measurement, rows: Sequence[Measurement]) -> Measurement | None:
    """The ``single`` row that `row` is compared with; None where there is none with figures."""
    singles = [each for each in rows if each.strategy == "single" and each.samples_per_s is not None]
    return next((each for each in reversed(singles) if _base_key(each) == _base_key(row)), None)


def _base_key(row: Measurement) -> tuple[Any, ...]:
    """What a row has in common with the ``single`` row that it is compared with."""
    shared = {name: value for name, value in row.settings.items() if name not in AXES or AXES[name].applies("single")}
    return row.workload, row.precision, tuple(sorted(shared.items()))


def _compared(row: Measurement, base: Measurement | None) -> Measurement:
    if base is None or base.samples_per_s is None or row.samples_per_s is None:
        return replace(row, findings=None)
    speedup = row.samples_per_s / base.samples_per_s
    same_batches = row.batch == base.batch
    efficiency = speedup / row.cards
    return replace(
        row,
        speedup=speedup,
        efficiency=efficiency,
        findings=row.findings if efficiency < EFFICIENT else None,
        largest_loss_difference=largest_difference(row.losses, base.losses) if same_batches else None,
    )


def finite(value: float) -> float | None:
    """`value`, or None where JSON has no word for it."""
    return value if math.isfinite(value) else None


def _noise(middle: float | None, spread: Sequence[float]) -> float | None:
    return (spread[1] - spread[0]) / 2 / middle if middle and len(spread) == 2 else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
