"""What ``cards=`` and ``--cards`` may say.

    ``all``      every card that torch sees
    ``auto``     the free ones; ``auto:N``: at most N of them
    ``2``        two cards, the best joined; the number 2 means the same
    ``0,2``      those two, in that order, the first is the primary; ``0,`` is card 0 alone; ``[0, 2]`` in Python
    ``cpu:N``    N simulated cards on the CPU

Numbers of a list are torch's (``cuda:i``). Anything else raises CardsError with the value and what to write.
Whether a listed card is there is `choose`'s business; that it isn't listed twice is settled here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from manycard.errors import CardsError

__all__ = ["CardSpec", "parse_spec"]

MOST_SIMULATED = 1024
"""More simulated cards than this is a slip of the keyboard; each holds a copy of the module."""

_FORMS = "write all, auto, auto:N, a count such as 2, a list such as 0,2 (`0,` is card 0 alone) or cpu:N"


@dataclass(frozen=True)
class CardSpec:
    """Which cards are asked for."""

    kind: Literal["all", "auto", "count", "list", "cpu"]
    given: object
    """As the user wrote it, for messages."""
    count: int | None = None
    """For ``auto`` at most so many, None for no limit; for ``count`` and ``cpu`` exactly so many."""
    indices: tuple[int, ...] = ()
    """For ``list``: torch's numbers, the primary first."""


def parse_spec(spec: str | int | Sequence[int]) -> CardSpec:
    """Read what the user asks for.

    Raises:
        CardsError: it is none of the forms, or a list names a card twice.

    Example:
        >>> parse_spec("0,2").indices, parse_spec(2).count, parse_spec("auto:4").count
        ((0, 2), 2, 4)
    """
    if isinstance(spec, str):
        return _parse_text(spec)
    if isinstance(spec, bool):
        raise CardsError("cards", spec, "it names no cards", fix=_FORMS)
    if isinstance(spec, int):
        return _counted(spec, spec)
    if isinstance(spec, Sequence):
        items: list[object] = list(spec)
        indices = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
        if len(indices) == len(items):
            return _listed(spec, indices)
    raise CardsError("cards", spec, "it names no cards", fix=_FORMS + ", or in Python a list of whole numbers")


def _parse_text(given: str) -> CardSpec:
    text = given.strip().lower()
    if text in ("all", "auto"):
        return CardSpec("all" if text == "all" else "auto", given)
    if written := re.fullmatch(r"(auto|cpu):\s*([+-]?[0-9]{1,9})", text):
        number = int(written[2])
        if written[1] == "auto":
            _at_least_one(given, number, "the number after auto:", "auto, or auto:1 and more")
            return CardSpec("auto", given, count=number)
        _at_least_one(given, number, "the number of simulated cards", "cpu:2")
        if number > MOST_SIMULATED:
            raise CardsError("cards", given, f"{number} simulated cards are too many", fix="write cpu:2 or cpu:4")
        return CardSpec("cpu", given, count=number)
    if re.fullmatch(r"[+-]?[0-9]{1,9}", text):
        return _counted(given, int(text))
    if re.fullmatch(r"[+-]?[0-9]{1,9}(\s*,\s*[+-]?[0-9]{1,9})*\s*,?", text):
        return _listed(given, [int(part) for part in text.split(",") if part.strip()])
    if written := re.fullmatch(r"cuda:([0-9]{1,9})", text):
        raise CardsError("cards", given, "that is a device", fix=f"write `{written[1]},` for that card alone")
    if text in ("cpu", "cuda", "gpu"):
        raise CardsError("cards", given, "that is no number of cards", fix="write cpu:N, or all for the GPUs")
    raise CardsError("cards", given, "it names no cards", fix=_FORMS)


def _listed(given: object, indices: list[int]) -> CardSpec:
    if not indices:
        raise CardsError("cards", given, "the list is empty", fix="name at least one card, or write all")
    for index in indices:
        if index < 0:
            raise CardsError(
                "cards", given, f"{index} is negative, and cards are numbered from 0", fix="write 0 or more"
            )
        if indices.count(index) > 1:
            raise CardsError("cards", given, f"card {index} stands there more than once", fix="name each card once")
    return CardSpec("list", given, indices=tuple(indices))


def _counted(given: object, count: int) -> CardSpec:
    _at_least_one(given, count, "a count of cards", "a count such as 2, or `0,` for card 0 alone")
    return CardSpec("count", given, count=count)


def _at_least_one(given: object, number: int, what: str, instead: str) -> None:
    if number < 1:
        raise CardsError("cards", given, f"{what} must be at least 1, and is {number}", fix=f"write {instead}")
