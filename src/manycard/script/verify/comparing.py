"""Comparing what one card did with what many did, step by step.

`compare` is pure: two recordings come in, a `Report` comes out. Steps are paired by their number, parameters by their
place in the optimizer. In a step the order is that of cause and effect: data, loss, gradient, learning rate,
parameter; the first that differs is the first difference.

How differences are measured, with g one card's and h many cards' vector:

    loss           |a - b| / the larger of |a| and 1 % of the largest |a| so far
    gradient       ||g - h|| / the largest ||g|| among the parameters in that step
    parameter      the same, of the parameters after the step
    learning rate  relative

Elements of parameters whose gradient was nothing but rounding in every step so far (a bias before a normalisation, an
attention's key bias) are set aside in the comparison of parameters: Adam makes a step of full length of rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from manycard.diagnosis.finding import Finding
from manycard.script.verify.causes import find_causes
from manycard.script.verify.differences import Compared, Difference, Named, StepDifference, Tolerances
from manycard.script.verify.recording import NO_OPTIMIZER, Recording, StepRecord, together
from manycard.script.verify.samples import same_rows

__all__ = ["Report", "compare"]

_ROUNDING = 1e-5
"""A gradient this much smaller than the largest of the step is rounding."""
_TOLERANCES = {
    "double": Tolerances(1e-8, 1e-7, 1e-7),
    "single": Tolerances(1e-4, 1e-3, 1e-3),
    "half": Tolerances(2e-2, 1e-1, 1e-2),
}
_SINGLE_ON_GPU = Tolerances(1e-3, 1e-2, 1e-3)
"""A convolution may run by another algorithm, and in TF32, for another size of batch."""


@dataclass(frozen=True)
class Report:
    """What the comparison found."""

    same: bool
    """Whether many cards compute what one card computes, within the tolerances."""
    steps: tuple[StepDifference, ...]
    first: Difference | None
    """The first difference beyond its tolerance."""
    causes: tuple[Finding, ...]
    tolerances: Tolerances
    sketched: bool
    """Whether differences of gradients and parameters are estimates."""
    set_aside: tuple[str, ...] = ()
    """Parameters that were not compared, or not all of them, because their gradients are rounding."""
    not_checked: tuple[str, ...] = ()
    """What the recordings can't tell."""
    cards: tuple[str, ...] = ()
    spread: tuple[dict[str, object], ...] = field(default=())
    """What became of the modules of a script that manycard spreads by itself."""

    @property
    def loss(self) -> float:
        """The largest difference of a loss."""
        return max((step.loss for step in self.steps), default=0.0)

    @property
    def gradient(self) -> Named:
        """The largest difference of a gradient."""
        return max((step.gradient for step in self.steps), key=lambda named: named.value, default=Named("", 0.0))

    @property
    def parameter(self) -> Named:
        """The largest difference of a parameter."""
        return max((step.parameter for step in self.steps), key=lambda named: named.value, default=Named("", 0.0))


def compare(one: Recording, ranks: Sequence[Recording], cards: int) -> Report:
    """Compare a run on one card with a run on many.

    Args:
        one: of the run on one card.
        ranks: of each process of the other; one for a run in one process.
        cards: how many cards the other used.

    Ranks in lockstep have each seen what one card sees: every one is compared, and the first that differs is shown.
    """
    if not ranks[0].in_lockstep:
        return _compare(one, together(ranks), ranks, cards)
    reports = [_compare(one, rank, ranks, cards) for rank in ranks]
    return next((report for report in reports if not report.same), reports[0])


def _compare(one: Recording, many: Recording, ranks: Sequence[Recording], cards: int) -> Report:
    tolerances = _SINGLE_ON_GPU if one.on_gpu and one.precision == "single" else _TOLERANCES[one.precision]
    comparison = _Comparison(one, many, tolerances.parameter, ordered=len(ranks) == 1 or many.in_lockstep)
    steps = tuple(comparison.step(number) for number in range(min(len(one.steps), len(many.steps))))
    first = comparison.initial() or _first(steps, tolerances) or _ended_apart(one, many)
    compared = Compared(one, tuple(ranks), many, steps, first, tolerances, cards)
    return Report(
        first is None,
        steps,
        first,
        tuple(find_causes(compared)),
        tolerances,
        one.sketched,
        tuple(sorted(comparison.set_aside)),
        _not_checked(compared),
        many.cards,
        many.spread,
    )


class _Comparison:
    """Goes through the steps in order."""

    def __init__(self, one: Recording, many: Recording, tolerance: float, *, ordered: bool) -> None:
        self._one = one
        self._many = many
        self._tolerance = tolerance
        self._ordered = ordered
        self._largest_loss = 0.0
        self._only_rounding: dict[int, list[Tensor]] = {}
        self.set_aside: set[str] = set()

    def initial(self) -> Difference | None:
        """The first parameter that differs before the first update of its optimizer."""
        for number, (one, many) in enumerate(zip(self._one.steps, self._many.steps, strict=False), start=1):
            if not one.before or not many.before:
                continue
            values = _distances(one.before, many.before)
            if len(one.before) != len(many.before) or max(values, default=0.0) > 1e-6:
                worst = _worst(values, self._names(one))
                return Difference(number, "initial parameters", worst.name, worst.value, one.step_at)
        return None

    def step(self, number: int) -> StepDifference:
        """Compare one step."""
        one, many = self._one.steps[number], self._many.steps[number]
        names = self._names(one)
        gradients = _distances(one.gradients, many.gradients)
        ratio, cosine = _ratio(one.gradients, many.gradients)
        return StepDifference(
            number=number + 1,
            backward_at=one.backward_at,
            step_at=one.step_at,
            losses=(one.losses, many.losses),
            loss=self._loss(one, many),
            rates=(one.rates, many.rates),
            gradient=_worst(gradients, names),
            parameter=_worst(self._parameters(one, many, names), names),
            same_data=self._same_data(one, many),
            ratio=ratio,
            cosine=cosine,
        )

    def _names(self, step: StepRecord) -> tuple[str, ...]:
        optimizers = self._one.optimizers
        return optimizers[step.optimizer].names if step.optimizer < len(optimizers) else ()

    def _loss(self, one: StepRecord, many: StepRecord) -> float:
        if len(one.losses) != len(many.losses):
            return math.inf
        largest = 0.0
        for a, b in zip(one.losses, many.losses, strict=True):
            if math.isfinite(a):
                self._largest_loss = max(self._largest_loss, abs(a))
            if a == b or (math.isnan(a) and math.isnan(b)):
                continue
            scale = max(abs(a), 0.01 * self._largest_loss, 1e-12)
            gap = abs(a - b) / scale
            largest = max(largest, gap if math.isfinite(gap) else math.inf)
        return largest

    def _parameters(self, one: StepRecord, many: StepRecord, names: Sequence[str]) -> list[float]:
        values = _distances(one.parameters, many.parameters)
        largest = max((_norm(parameter) for parameter in one.parameters), default=0.0)
        masks = self._follow_rounding(one)
        for place, value in enumerate(values):
            if value <= self._tolerance or not math.isfinite(value) or place >= len(masks):
                continue
            gap = (one.parameters[place].double() - many.parameters[place].double()) * ~masks[place]
            rest = _norm(gap) / max(largest, 1e-12)
            if rest <= self._tolerance:
                values[place] = rest
                self.set_aside.add(names[place] if place < len(names) else f"parameter {place}")
        return values

    def _follow_rounding(self, one: StepRecord) -> list[Tensor]:
        """Of each parameter, which elements have had gradients of rounding only, in every step so far."""
        size = "norm" if self._one.sketched else "elements"
        sizes = [_gradient_sizes(gradient, size) for gradient in one.gradients]
        largest = max((float(each.max()) for each in sizes if each.numel() and math.isfinite(each.max())), default=0.0)
        tiny = [each <= _ROUNDING * largest for each in sizes]
        before = self._only_rounding.get(one.optimizer, tiny)
        if len(before) == len(tiny):
            tiny = [a & b if a.shape == b.shape else b & False for a, b in zip(before, tiny, strict=True)]
        self._only_rounding[one.optimizer] = tiny
        return tiny

    def _same_data(self, one: StepRecord, many: StepRecord) -> bool:
        if len(one.calls) != len(many.calls):
            return False
        pairs = zip(one.calls, many.calls, strict=True)
        return all(same_rows(a.rows, b.rows, ordered=self._ordered) for a, b in pairs)


def _first(steps: Sequence[StepDifference], tolerances: Tolerances) -> Difference | None:
    for step in steps:
        if not step.same_data:
            return Difference(step.number, "data", "", math.nan, step.backward_at)
        if step.loss > tolerances.loss:
            return Difference(step.number, "loss", "", step.loss, step.backward_at)
        if step.gradient.value > tolerances.gradient:
            return Difference(step.number, "gradient", step.gradient.name, step.gradient.value, step.backward_at)
        if not step.same_rates:
            return Difference(step.number, "learning rate", "", step.rate, step.step_at)
        if step.parameter.value > tolerances.parameter:
            return Difference(step.number, "parameter", step.parameter.name, step.parameter.value, step.step_at)
    return None


def _ended_apart(one: Recording, many: Recording) -> Difference | None:
    """Where one of the runs made fewer steps than the other."""
    fewer, more = sorted((one, many), key=lambda recording: len(recording.steps))
    if len(fewer.steps) == len(more.steps):
        return None
    number = len(fewer.steps)
    where = more.steps[number].step_at
    return Difference(number + 1, "number of steps", "", float(len(more.steps) - number), where)


def _distances(one: Sequence[Tensor | None], many: Sequence[Tensor | None]) -> list[float]:
    """||g - h|| of each pair, relative to the largest ||g||; None counts as zeros."""
    if len(one) != len(many):
        return [math.inf] * max(len(one), len(many))
    largest = max((_norm(g) for g in one if g is not None), default=0.0)
    return [_distance(g, h, max(largest, 1e-12)) for g, h in zip(one, many, strict=True)]


def _distance(g: Tensor | None, h: Tensor | None, largest: float) -> float:
    if g is None or h is None:
        only = g if h is None else h
        return 0.0 if only is None else _norm(only) / largest
    if g.shape != h.shape:
        return math.inf
    if torch.equal(g, h) or (not bool(g.isfinite().all()) and torch.equal(g.isfinite(), h.isfinite())):
        return 0.0
    gap = _norm(g.double() - h.double()) / largest
    return gap if math.isfinite(gap) else math.inf


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))


def _gradient_sizes(gradient: Tensor | None, of: str) -> Tensor:
    """The size of each element of a gradient, or of all together, of which a sketch tells no more."""
    if gradient is None:
        return torch.tensor([math.inf], dtype=torch.float64)  # no rounding: nothing moves the parameter
    return gradient.abs() if of == "elements" else torch.tensor([_norm(gradient)], dtype=torch.float64)


def _worst(values: Sequence[float], names: Sequence[str]) -> Named:
    if not values:
        return Named("", 0.0)
    place = max(range(len(values)), key=values.__getitem__)
    return Named(names[place] if place < len(names) else f"parameter {place}", values[place])


def _ratio(one: Sequence[Tensor | None], many: Sequence[Tensor | None]) -> tuple[float, float]:
    """How many times as long as one card's gradient the other is along it, and the cosine between them."""
    if len(one) != len(many):
        return math.nan, math.nan
    products, squares, other = 0.0, 0.0, 0.0
    for g, h in zip(one, many, strict=True):
        if g is not None and h is not None and g.shape == h.shape:
            products += float(g.double() @ h.double())
        squares += 0.0 if g is None else _norm(g) ** 2
        other += 0.0 if h is None else _norm(h) ** 2
    if not squares or not other:
        return math.nan, math.nan
    return products / squares, products / math.sqrt(squares * other)


def _not_checked(compared: Compared) -> tuple[str, ...]:
    """What the recordings can't tell, as ends of a sentence."""
    said = []
    if compared.not_comparable:
        said.append(
            "losses, gradients and parameters against one card: one rank's batch is not what all ranks get together"
        )
    if compared.many.shuffles and len({step.epoch for step in compared.many.steps}) < 2:
        said.append("whether the order of samples changes between epochs: the steps are those of one epoch")
    if not any(step.gradients for step in compared.one.steps):
        said.append("gradients and parameters: the script has no optimizer of PyTorch's, and calls no module")
    elif compared.one.optimizers and compared.one.optimizers[0].kind == NO_OPTIMIZER:
        said.append("updates: the script has no optimizer of PyTorch's, so each backward pass counts as a step")
    return tuple(said)
