"""What strategy ``manual`` was asked for: shares of each batch by weight, or a split of the script's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from manycard.engine.batches.cutting import Split
from manycard.engine.split_calls import Merge
from manycard.errors import SettingError

__all__ = ["AUTO", "Splitting"]

AUTO = "auto"


@dataclass(frozen=True)
class Splitting:
    """How a global batch is split.

    Raises:
        SettingError: a value can't work, or two don't go together.
    """

    weights: str | Sequence[float] | None = None
    """One a card, such as ``[2, 1]``; ``"auto"`` finds them by timing; None for ``"auto"``, unless there is `split`."""
    split: Split | None = None
    """``split(batch, cards)`` -> one shard a card; it decides alone."""
    merge: Merge | None = None
    """``merge(outputs)`` -> output, for calls of the model outside a train step, which `split` cuts then as well."""
    check_split: bool = True
    """Compare what `split` returns with the batch: always by count, the first batches by content."""

    def __post_init__(self) -> None:
        functions: dict[str, Any] = {"split": self.split, "merge": self.merge}
        for name, value in functions.items():
            if value is not None and not callable(value):
                raise SettingError(name, value, "it is no function", fix=f"give {name}=my_{name}, a function of yours")
        if self.split is not None and self.weights is not None:
            problem = "split decides by itself what each card gets"
            raise SettingError("weights", self.weights, problem, fix="give either weights or split")
        if self.merge is not None and self.split is None:
            raise SettingError(
                "merge",
                self.merge,
                "without split, outputs are joined as the batch was cut",
                fix="leave it out, or give split as well",
            )
        if self.weights is not None and self.weights != AUTO:
            object.__setattr__(self, "weights", _checked(self.weights))

    @property
    def auto(self) -> bool:
        """Whether weights are found by timing."""
        return self.split is None and self.weights in (None, AUTO)

    @property
    def numbers(self) -> tuple[float, ...] | None:
        """The weights, where they are given as numbers."""
        return None if self.weights is None or isinstance(self.weights, str) else tuple(self.weights)

    @property
    def given(self) -> dict[str, Any]:
        """What differs from the defaults, by name."""
        pairs = {"weights": self.weights, "split": self.split, "merge": self.merge}
        return {name: value for name, value in pairs.items() if value is not None}

    def check_fits(self, cards: int) -> None:
        """Check that there is a weight for each of `cards` cards.

        Raises:
            SettingError: there are more or fewer.
        """
        weights = self.numbers
        if weights is None or len(weights) == cards:
            return
        there = f"{len(weights)} weight{'s'[: len(weights) != 1]} for {cards} card{'s'[: cards > 1]}"
        example = _shown([*weights[:cards], *[1] * (cards - len(weights))])
        raise SettingError("weights", _shown(weights), there, fix=f"give one a card, such as weights={example}")


def _checked(weights: Any) -> tuple[float, ...]:
    """The weights, all numbers above 0."""
    fix = 'give one number above 0 a card, such as weights=[2, 1], or weights="auto"'
    if isinstance(weights, str | bytes) or not isinstance(weights, Sequence):
        raise SettingError("weights", weights, 'it is neither a list of numbers nor "auto"', fix=fix)
    numbers: Sequence[Any] = weights
    for card, weight in enumerate(numbers):
        if isinstance(weight, bool) or not isinstance(weight, int | float | np.number):
            raise SettingError("weights", weights, f"weight {card}, {weight!r}, is no number", fix=fix)
        if not (math.isfinite(weight) and weight > 0):
            leave = "; to leave a card out, name the others in cards="
            raise SettingError("weights", weights, f"weight {card}, {weight!r}, is not above 0", fix=fix + leave)
    return tuple(float(weight) for weight in weights)


def _shown(weights: Sequence[float]) -> list[float]:
    return [int(weight) if float(weight).is_integer() else weight for weight in weights]
