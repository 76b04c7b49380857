"""The words in which two runs are compared: tolerances, one step's differences, the first difference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from manycard.script.verify.recording import Recording

__all__ = ["Compared", "Difference", "Named", "StepDifference", "Tolerances", "What"]

What = Literal["data", "loss", "gradient", "learning rate", "parameter", "initial parameters", "number of steps"]


@dataclass(frozen=True)
class Tolerances:
    """The largest differences that another order of summation explains; relative."""

    loss: float
    gradient: float
    """Relative to the largest gradient of the step."""
    parameter: float
    """Relative to the largest parameter."""


@dataclass(frozen=True)
class Named:
    """A difference, and the parameter that shows it."""

    name: str
    value: float


@dataclass(frozen=True)
class Difference:
    """One difference beyond its tolerance."""

    step: int
    """Counted from 1."""
    what: What
    name: str
    """The parameter, where it is one's."""
    value: float
    """How large, relative; NaN where it has no size."""
    where: str
    """The line of the script, as ``file:line``."""


@dataclass(frozen=True)
class StepDifference:
    """How one step differs; each value relative, as `manycard.script.verify.comparing` says."""

    number: int
    """Counted from 1."""
    backward_at: str
    step_at: str
    losses: tuple[tuple[float, ...], tuple[float, ...]]
    """One card's and many cards'."""
    loss: float
    rates: tuple[tuple[float, ...], tuple[float, ...]]
    gradient: Named
    parameter: Named
    same_data: bool
    ratio: float
    """Many cards' gradient over one card's, along one card's."""
    cosine: float
    """Between the two."""

    @property
    def rate(self) -> float:
        """The largest relative difference of a learning rate."""
        one, many = self.rates
        if len(one) != len(many):
            return math.inf
        return max((abs(a - b) / max(abs(a), 1e-30) for a, b in zip(one, many, strict=True) if a != b), default=0.0)

    @property
    def same_rates(self) -> bool:
        """Whether learning rates are equal."""
        return self.rate <= 1e-6


@dataclass(frozen=True)
class Compared:
    """All that causes are found in."""

    one: Recording
    ranks: tuple[Recording, ...]
    """Of each process of the run on many cards."""
    many: Recording
    """The ranks together."""
    steps: tuple[StepDifference, ...]
    first: Difference | None
    tolerances: Tolerances
    cards: int

    @property
    def at(self) -> StepDifference | None:
        """The step of the first difference."""
        if self.first is None or self.first.step > len(self.steps):
            return None
        return self.steps[self.first.step - 1]

    @property
    def in_numbers(self) -> bool:
        """Whether the first difference is one of numbers that forward and backward compute."""
        if self.first is None:
            return False
        return self.first.what in ("loss", "gradient", "parameter") or self.inputs_follow

    @property
    def inputs_follow(self) -> bool:
        """Whether inputs differ because of what forward does on many cards.

        In one process, and in ranks in lockstep, both runs draw the same data. Where forward draws, or takes
        statistics, what one module computes for the next differs, and so do draws that come later.
        """
        if self.at is None or self.first is None or self.first.what != "data":
            return False
        if len(self.ranks) > 1 and not self.many.in_lockstep:
            return False
        one, many = (recording.steps[self.at.number - 1] for recording in (self.one, self.many))
        alike = [len(call.rows) for call in one.calls] == [len(call.rows) for call in many.calls]
        return alike and (self.one.draws or bool(self.many.batchnorm))

    @property
    def not_comparable(self) -> bool:
        """Whether ranks share a global batch that one rank alone doesn't get."""
        if len(self.ranks) < 2 or not self.one.steps or not self.many.steps:
            return False
        alone, all_of_them = self.one.steps[0].samples, self.many.steps[0].samples
        return alone > 0 and alone != all_of_them
