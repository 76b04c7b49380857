"""Where to cut a model into stages: pure, from the measured costs of its parts.

The slowest stage sets the pace of a pipeline. So of all ways of cutting the parts, in their order, into stages that fit
their cards, the one whose slowest stage is the fastest is taken; of equally fast ones, that with the smallest sum of
squared times, which is the most even. n parts on p cards take O(n^2 p) steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from manycard.cards import in_words
from manycard.errors import ModelError

__all__ = ["Costs", "PartCost", "Room", "balance", "check_fits", "stage_bytes"]


@dataclass(frozen=True)
class PartCost:
    """What one part of a model costs with one micro-batch."""

    name: str
    seconds: float
    """Forward and backward."""
    parameter_bytes: int
    """Parameters and buffers that no earlier part holds."""
    trained_bytes: int
    """Of those, the parameters that require gradients."""
    activation_bytes: int
    """What forward keeps for backward."""


@dataclass(frozen=True)
class Room:
    """What a stage may use."""

    limit: int | None
    """Bytes; None where it isn't known (simulated cards)."""
    in_flight: int
    """Micro-batches whose activations it holds at once."""
    state_copies: int
    """Copies of the trained parameters that gradients and optimizer state take together."""


@dataclass(frozen=True)
class Costs:
    """The parts of a model, in the order in which they run."""

    parts: tuple[PartCost, ...]

    @cached_property
    def _sums(self) -> tuple[list[float], list[int], list[int], list[int]]:
        return (
            list(accumulate((part.seconds for part in self.parts), initial=0.0)),
            list(accumulate((part.parameter_bytes for part in self.parts), initial=0)),
            list(accumulate((part.trained_bytes for part in self.parts), initial=0)),
            list(accumulate((part.activation_bytes for part in self.parts), initial=0)),
        )

    def seconds(self, start: int, end: int) -> float:
        """The time of parts `start` to `end`, exclusive."""
        sums = self._sums[0]
        return sums[end] - sums[start]

    def bytes(self, start: int, end: int, room: Room) -> int:
        """The memory of parts `start` to `end` as one stage."""
        parameters, trained, activations = (sums[end] - sums[start] for sums in self._sums[1:])
        return parameters + trained * room.state_copies + activations * room.in_flight


def stage_bytes(costs: Costs, cuts: Sequence[int], rooms: Sequence[Room]) -> list[int]:
    """The memory that each stage takes."""
    edges = [0, *cuts, len(costs.parts)]
    return [costs.bytes(start, end, room) for start, end, room in zip(edges, edges[1:], rooms, strict=False)]


def check_fits(costs: Costs, cuts: Sequence[int], rooms: Sequence[Room], cards: Sequence[str], fix: str = "") -> None:
    """Check that each stage fits its card.

    Args:
        fix: what to do where one doesn't.

    Raises:
        ModelError: one doesn't; names it, what it needs and what there is.
    """
    edges = [0, *cuts, len(costs.parts)]
    for stage, (needed, room) in enumerate(zip(stage_bytes(costs, cuts, rooms), rooms, strict=True)):
        if room.limit is not None and needed > room.limit:
            first, last = costs.parts[edges[stage]].name, costs.parts[edges[stage + 1] - 1].name
            raise ModelError(
                f"stage {stage} ({first} to {last}) needs about {in_words(needed)} on {cards[stage]}, which has"
                f" {in_words(room.limit)} for it: {_split_up(costs, edges[stage], edges[stage + 1], room)}",
                fix=fix,
            )


def _split_up(costs: Costs, start: int, end: int, room: Room) -> str:
    without = Room(room.limit, 0, room.state_copies)
    weights = costs.bytes(start, end, without)
    activations = costs.bytes(start, end, room) - weights
    number = f"{room.in_flight} micro-batch{'es'[: 2 * (room.in_flight != 1)]}"
    return f"{in_words(weights)} of parameters, gradients and optimizer state, {in_words(activations)} for {number}"


def balance(costs: Costs, rooms: Sequence[Room], cards: Sequence[str], fix: str = "") -> list[int]:
    """Where each stage but the first begins.

    Args:
        costs: the parts.
        rooms: what each stage may use, in order.
        cards: their names, for the error.
        fix: what to do where no way fits.

    Returns:
        ``len(rooms) - 1`` rising indices of parts.

    Raises:
        ModelError: there are fewer parts than stages, or no way of cutting that fits.

    Example:
        >>> parts = tuple(PartCost(str(number), seconds, 0, 0, 0) for number, seconds in enumerate((1, 1, 4, 2)))
        >>> balance(Costs(parts), [Room(None, 1, 3)] * 2, ["cpu:0", "cpu:1"])
        [2]
    """
    number, stages = len(costs.parts), len(rooms)
    if number < stages:
        raise ModelError(
            f"the model has {number} part{'s'[: number != 1]} that can be cut apart"
            f" ({', '.join(part.name for part in costs.parts)}), too few for {stages} stages",
            fix="take fewer cards, or build the model of more modules",
        )
    # best[end]: (slowest stage, sum of squares, cuts) of the first `end` parts on the stages so far.
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for stage, room in enumerate(rooms):
        found: dict[int, tuple[float, float, list[int]]] = {}
        for end in range(stage + 1, number - (stages - stage - 1) + 1):
            for start, (slowest, squares, cuts) in best.items():
                if start >= end or (room.limit is not None and costs.bytes(start, end, room) > room.limit):
                    continue
                seconds = costs.seconds(start, end)
                candidate = (max(slowest, seconds), squares + seconds**2, [*cuts, start] if stage else [])
                if end not in found or candidate[:2] < found[end][:2]:
                    found[end] = candidate
        best = found
    if number not in best:
        raise ModelError(_no_fit(costs, rooms, cards), fix=fix)
    return best[number][2]


def _no_fit(costs: Costs, rooms: Sequence[Room], cards: Sequence[str]) -> str:
    """Why no cut fits: one part is too large for every card, or all of them together for all cards."""
    for index, part in enumerate(costs.parts):
        needed = [costs.bytes(index, index + 1, room) for room in rooms]
        if all(room.limit is not None and size > room.limit for size, room in zip(needed, rooms, strict=True)):
            roomiest = max(range(len(rooms)), key=lambda stage: (rooms[stage].limit or 0) - needed[stage])
            return (
                f"part {part.name} alone needs about {in_words(needed[roomiest])}, and no card has room for it"
                f" ({cards[roomiest]} has {in_words(rooms[roomiest].limit)})"
            )
    whole = sum(costs.bytes(index, index + 1, rooms[0]) for index in range(len(costs.parts)))
    free = ", ".join(f"{card} has {in_words(room.limit)}" for card, room in zip(cards, rooms, strict=True))
    return f"no way of cutting the model into {len(rooms)} stages fits: it needs about {in_words(whole)}, and {free}"
