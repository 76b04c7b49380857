"""Choosing cards: from what the user asks for and what is there to the cards that a run uses.

Behaviour:
    * ``all`` takes every card that torch sees. Without any it falls back to one simulated card, and says so.
    * ``auto`` leaves out cards that are short of memory or that somebody else computes on, then all but the
      equal ones that compute most together, then, with a limit, all but the best joined. When none is free it
      raises CardsError, naming what is in the way on each; it never falls back to a busy card.
    * A count takes the best ones by the same preference. A busy card is used last, and then with a warning.
    * A list is taken as it is, in its order; what stands against a card is said, not acted on.
    * `min_free` and `exclude_busy`, when they are given, leave cards out of everything but a list.
    * NCCL refuses two slices of one card: of those, one is kept and the others left out; in a list that is
      an error.
    * Everything left out, and every reason for doubt, is in `CardChoice.describe`. Nothing is silent.
    * Cards of the choice are in ascending order of torch's numbers, but a list's, which are in its own.

`choose` is pure: what is there comes in, the choice comes out. `choose_cards` reads what is there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from manycard.cards.card import Card
from manycard.cards.inventory import CardInfo, read_machine
from manycard.cards.links import Links, links
from manycard.cards.memory_size import GIB, in_words, parse_size
from manycard.cards.prefer import best_equal_group, best_of, model_of
from manycard.cards.processes import CardProcess, own_pids
from manycard.cards.spec import CardSpec, parse_spec
from manycard.cards.visible import visible_now
from manycard.errors import CardsError, SettingError

__all__ = ["DEFAULT_MIN_FREE", "SLOWDOWN_VARIABLE", "CardChoice", "LeftOut", "choose", "choose_cards", "others_on"]

DEFAULT_MIN_FREE = 2 * GIB
"""Free memory below which ``auto`` leaves a card out: a CUDA context, NCCL's buffers and cuBLAS's workspaces
take most of 1 GiB before the first parameter."""

SLOWDOWN_VARIABLE = "MANYCARD_SIMULATED_SLOWDOWN"
"""An environment variable: factors such as ``1,3``, by which simulated cards take longer, to try out uneven cards."""


@dataclass(frozen=True)
class LeftOut:
    """A card that was not chosen."""

    name: str
    """Such as ``cuda:1 (NVIDIA H200)``."""
    reason: str
    """Why, in words."""


@dataclass(frozen=True)
class CardChoice:
    """The cards of a run, and what there is to say about them."""

    cards: tuple[Card, ...]
    """The primary first."""
    left_out: tuple[LeftOut, ...] = ()
    """Cards that torch sees and that are not used."""
    said: tuple[str, ...] = ()
    """Fallbacks and doubts, a sentence each without its full stop."""

    def describe(self) -> str:
        """A line for each card left out and each thing to know; empty when there is nothing to say."""
        lines = [f"{card.name} is left out: {card.reason}." for card in self.left_out]
        return "\n".join(lines + [f"{line[:1].upper()}{line[1:]}." for line in self.said])

    def summary(self) -> str:
        """What was chosen, in one line, such as ``2 cards: cuda:0, cuda:1 (NVIDIA H200)``."""
        models = list(dict.fromkeys(card.model for card in self.cards))
        names = ", ".join(card.name for card in self.cards)
        return f"{len(self.cards)} card{'s'[: len(self.cards) > 1]}: {names} ({', '.join(models)})"


def choose_cards(
    spec: str | int | Sequence[int] = "all", *, min_free: int | str | None = None, exclude_busy: bool | None = None
) -> CardChoice:
    """Choose the cards of a run among those that torch sees.

    Args:
        spec: ``all``, ``auto``, ``auto:N``, a count, a list of torch's numbers (``0,2``; ``0,``; ``[0, 2]``) or
            ``cpu:N``.
        min_free: leave out cards with less free memory, bytes or a string such as ``2GiB``. For ``auto`` 2 GiB
            unless given; else none.
        exclude_busy: leave out cards that processes other than ours compute on. On for ``auto`` unless given;
            else off.

    Raises:
        CardsError: cards that aren't there or can't be used together, none left, or a value that can't be read.

    Example:
        >>> choice = choose_cards("cpu:2")
        >>> [card.name for card in choice.cards], choice.describe()
        (['cpu:0', 'cpu:1'], '')
    """
    parsed = parse_spec(spec)
    limit = None if min_free is None else parse_size(min_free, setting="min_free")
    if parsed.kind == "cpu":
        return CardChoice(_simulated(parsed.count or 1))
    machine = read_machine()
    visible = visible_now(machine.cards, machine.why_none)
    pids = own_pids() | _pids_that_must_be_ours(visible.cards)
    return choose(
        parsed,
        visible.cards,
        links(visible.cards),
        own_pids=pids,
        min_free=limit,
        exclude_busy=exclude_busy,
        said=visible.said,
        hidden=max(len(machine.cards) - len(visible.cards), 0),
    )


def choose(
    spec: CardSpec,
    infos: Sequence[CardInfo],
    links: Links,
    *,
    own_pids: Collection[int] = (),
    min_free: int | None = None,
    exclude_busy: bool | None = None,
    said: Sequence[str] = (),
    hidden: int = 0,
) -> CardChoice:
    """Choose among given cards; see `choose_cards`.

    Args:
        spec: what is asked for.
        infos: the cards that torch sees, in its order; place i is ``cuda:i``.
        links: how they are joined.
        own_pids: processes that are ours, and so make no card busy.
        min_free: bytes; None for the default of `spec`.
        exclude_busy: None for the default of `spec`.
        said: what is known already about the cards, such as why there are none.
        hidden: how many more cards the machine has that torch doesn't see, for the words.
    """
    if spec.kind == "cpu":
        return CardChoice(_simulated(spec.count or 1))
    if not infos:
        return _without_cards(spec, said)
    auto = spec.kind == "auto"
    busy = _each(infos, lambda info: _in_use(info, own_pids))
    short = _each(infos, lambda info: _too_little(info, DEFAULT_MIN_FREE if min_free is None else min_free, own_pids))
    troubles = {i: " and ".join(t[i] for t in (busy, short) if i in t) for i in sorted({*busy, *short})}
    if spec.kind == "list":
        return _listed(spec, infos, troubles, said, hidden)

    out = _further_slices(infos)
    if exclude_busy or (exclude_busy is None and auto):
        out = {**busy, **out}
    if auto or min_free is not None:
        out = {**short, **out}
    left = [place for place in range(len(infos)) if place not in out]
    _check_enough(spec, infos, left, out, hidden)
    chosen, passed_over = _select(spec, infos, links, left, troubles)
    return _choice(infos, chosen, {**out, **passed_over}, [*said, *_doubts(infos, chosen, troubles)])


def _select(
    spec: CardSpec, infos: Sequence[CardInfo], links: Links, left: Sequence[int], troubles: Mapping[int, str]
) -> tuple[list[int], dict[int, str]]:
    """Of the cards that can be used those that are, and why each of the others isn't."""
    if spec.kind == "all":
        return list(left), {}
    if spec.kind == "count":
        chosen = best_of(infos, left, spec.count or 1, links, troubles)
        spare = _spare(spec, len(chosen))
        return chosen, {i: f"{spare}; {troubles[i]}" if i in troubles else spare for i in left if i not in chosen}
    group = best_equal_group(infos, left, spec.count)
    chosen = best_of(infos, group, min(spec.count or len(group), len(group)), links)
    unequal = f"it isn't equal to the others ({len(group)} x {infos[group[0]].name})"
    out = {i: unequal for i in left if i not in group}
    return chosen, out | {i: _spare(spec, len(chosen)) for i in group if i not in chosen}


def _each(infos: Sequence[CardInfo], find: Callable[[CardInfo], str]) -> dict[int, str]:
    """Place -> words, for the cards that `find` has words for."""
    return {place: words for place, info in enumerate(infos) if (words := find(info))}


def others_on(info: CardInfo, own_pids: Collection[int]) -> list[CardProcess]:
    """Processes other than ours that compute on a card."""
    return [process for process in info.processes or () if process.computes and process.pid not in own_pids]


def _too_little(info: CardInfo, least: int, own_pids: Collection[int]) -> str:
    if info.memory_free is None:
        return ""
    # What we hold already we can use again, so that a second choice in one process is like the first.
    ours = sum(process.memory or 0 for process in info.processes or () if process.pid in own_pids)
    if info.memory_free + ours >= least:
        return ""
    return f"only {in_words(info.memory_free)} of {in_words(info.memory_total)} are free, under {in_words(least)}"


def _in_use(info: CardInfo, own_pids: Collection[int]) -> str:
    others = others_on(info, own_pids)
    if not others:
        return ""
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return f"in use by {others[0]}{more}"


def _further_slices(infos: Sequence[CardInfo]) -> dict[int, str]:
    """Devices beside the largest one on each PCI bus id, and why they can't be used with it."""
    kept: dict[str, int] = {}
    for place, info in enumerate(infos):
        best = kept.get(info.pci_bus_id)
        if info.pci_bus_id and (best is None or (info.memory_total or 0) > (infos[best].memory_total or 0)):
            kept[info.pci_bus_id] = place
    out = {}
    for place, info in enumerate(infos):
        best = kept.get(info.pci_bus_id, place)
        if best != place:
            out[place] = f"it is on the same card as cuda:{best}, and NCCL refuses two slices of one card"
    return out


def _listed(
    spec: CardSpec, infos: Sequence[CardInfo], troubles: Mapping[int, str], said: Sequence[str], hidden: int
) -> CardChoice:
    for index in spec.indices:
        if index >= len(infos):
            raise CardsError(
                "cards",
                spec.given,
                f"there is no card {index}; torch sees {_there(infos, hidden)}",
                fix=f"name cards from 0 to {len(infos) - 1}" if len(infos) > 1 else "write `0,` or all",
            )
    on_bus: dict[str, int] = {}
    for index in spec.indices:
        bus = infos[index].pci_bus_id
        if bus and bus in on_bus:
            raise CardsError(
                "cards",
                spec.given,
                f"cards {on_bus[bus]} and {index} are slices of one card ({bus}), and NCCL refuses two of one card",
                fix="name one of them, or switch MIG mode off to use the whole card",
            )
        on_bus[bus] = index
    rest = {i: "it isn't in the list" for i in range(len(infos)) if i not in spec.indices}
    return _choice(infos, spec.indices, rest, [*said, *_doubts(infos, spec.indices, troubles)])


def _check_enough(
    spec: CardSpec, infos: Sequence[CardInfo], left: Sequence[int], out: Mapping[int, str], hidden: int
) -> None:
    wanted = spec.count if spec.kind == "count" and spec.count else 1
    if len(left) >= wanted:
        return
    if len(infos) < wanted:
        raise CardsError(
            "cards",
            spec.given,
            f"{wanted} cards are asked for, and torch sees {len(infos)}: {_there(infos, hidden)}",
            fix=f"ask for at most {len(infos)}, or write cpu:{wanted} for simulated cards",
        )
    why = "; ".join(f"cuda:{place}: {reason}" for place, reason in sorted(out.items()))
    raise CardsError(
        "cards",
        spec.given,
        f"{len(left)} of the {len(infos)} cards can be used, and {wanted} must be ({why})",
        fix="wait for them, lower min_free, or name the cards to use in spite of that, such as `0,`",
    )


def _without_cards(spec: CardSpec, said: Sequence[str]) -> CardChoice:
    why = "; ".join(said) or "there is no GPU here"
    if spec.kind in ("all", "auto"):
        fallback = f"one simulated card on the CPU is used, since {why}; cpu:N simulates several"
        return CardChoice(_simulated(1), said=(fallback,))
    wanted = spec.count or len(spec.indices)
    missing = f"there is no card {spec.indices[0]}" if spec.kind == "list" else f"there are no {wanted} cards"
    raise CardsError("cards", spec.given, f"{missing}: {why}", fix=f"write cpu:{wanted} for simulated cards, or all")


def _spare(spec: CardSpec, wanted: int) -> str:
    return f"{spec.given} asks for {wanted} card{'s' if wanted > 1 else ''}, and others go better together"


def _doubts(infos: Sequence[CardInfo], chosen: Sequence[int], troubles: Mapping[int, str]) -> list[str]:
    doubts = [f"cuda:{place} is used in spite of this: {troubles[place]}" for place in chosen if place in troubles]
    models = {model_of(infos[place]) for place in chosen}
    if len(models) > 1:
        names = ", ".join(f"{name} ({size} GiB)" for name, size in sorted(models))
        doubts.append(f"the cards are unequal ({names}), and the weakest sets the pace; `auto` takes equal ones")
    return doubts


def _choice(
    infos: Sequence[CardInfo], chosen: Sequence[int], out: Mapping[int, str], said: Sequence[str]
) -> CardChoice:
    cards = tuple(
        Card(position, torch.device("cuda", place), infos[place].name, infos[place].uuid)
        for position, place in enumerate(chosen)
    )
    left = tuple(LeftOut(f"cuda:{place} ({infos[place].name})", out[place]) for place in sorted(out))
    return CardChoice(cards, left, tuple(said))


def _there(infos: Sequence[CardInfo], hidden: int) -> str:
    here = ", ".join(f"{place}: {info.name}" for place, info in enumerate(infos))
    return f"{here} (CUDA_VISIBLE_DEVICES hides {hidden} more)" if hidden else here


def _simulated(count: int) -> tuple[Card, ...]:
    factors = [*_slowdowns(), *[1.0] * count]
    return tuple(Card(position, torch.device("cpu"), slowdown=factors[position]) for position in range(count))


def _slowdowns() -> list[float]:
    """How many times as long the first simulated cards shall take, as `SLOWDOWN_VARIABLE` says."""
    given = os.environ.get(SLOWDOWN_VARIABLE, "")
    try:
        factors = [float(word) for word in given.split(",") if word.strip()]
    except ValueError:
        factors = [0.0]
    if not all(1 <= factor < float("inf") for factor in factors):
        problem = "it is no list of factors of at least 1, one a card"
        raise SettingError(SLOWDOWN_VARIABLE, given, problem, fix=f"write {SLOWDOWN_VARIABLE}=1,3, say, or unset it")
    return factors


def _pids_that_must_be_ours(infos: Sequence[CardInfo]) -> frozenset[int]:
    """Pids of another container's numbering on cards where this process holds memory.

    Within a container some drivers give the host's pids, so that our own process looks like a stranger's. It
    can't be told from one; where we hold memory, the benefit of the doubt is ours.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return frozenset()
    return frozenset(
        process.pid
        for place, info in enumerate(infos)
        if torch.cuda.memory_reserved(place)
        for process in info.processes or ()
        if process.command is None and process.user is None
    )
