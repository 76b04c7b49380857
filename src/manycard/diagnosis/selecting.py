"""The cards of a choice as CUDA_VISIBLE_DEVICES names them, for programs that know nothing of manycard.

Numbers are used where they can mean one thing only; UUIDs where CUDA may number cards otherwise than the driver does
(unequal cards without CUDA_DEVICE_ORDER=PCI_BUS_ID), and for MIG slices.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from manycard.cards import CardChoice, CardInfo, Machine, Visible, choose_cards, read_machine, visible_now

__all__ = ["Selection", "name_for_cuda", "select"]


@dataclass(frozen=True)
class Selection:
    """The cards chosen, for CUDA_VISIBLE_DEVICES."""

    value: str
    """Such as ``0,2``; empty where there is no GPU, which hides all."""
    names: tuple[str, ...]
    """Torch's names of the cards before the variable is set."""
    said: str
    """What was left out and why, a line each."""
    left_out: dict[str, str]
    """Card -> why it was left out."""


def select(spec: str) -> Selection:
    """Choose cards and name them for CUDA.

    Args:
        spec: as ``--cards`` takes it.

    Raises:
        CardsError: those cards can't be had.
    """
    choice = choose_cards(spec)
    machine = read_machine()
    return name_for_cuda(choice, machine, visible_now(machine.cards, machine.why_none), os.environ)


def name_for_cuda(choice: CardChoice, machine: Machine, visible: Visible, environment: Mapping[str, str]) -> Selection:
    """Name a choice of cards for CUDA; see `select`."""
    infos = [visible.cards[card.device.index] for card in choice.cards if not card.simulated]
    left_out = {left.name: left.reason for left in choice.left_out}
    said = choice.describe()
    if not infos:
        said = f"{said}\nThere is no GPU to select: the empty value hides all.".strip()
    names = tuple(card.name for card in choice.cards)
    return Selection(_value(infos, machine, environment), names, said, left_out)


def _value(infos: list[CardInfo], machine: Machine, environment: Mapping[str, str]) -> str:
    equal = len({info.name for info in machine.cards}) == 1
    by_number = bool(machine.cards) and (equal or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID")
    if by_number and not any(info.slice_of for info in infos):
        return ",".join(str(info.index) for info in infos)
    return ",".join(info.uuid for info in infos)
