"""Which of the machine's cards torch sees, in torch's numbering.

CUDA numbers the cards of a process by CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER; NVML and nvidia-smi number
all of them by PCI bus id. `map_visible` follows CUDA's rules, as torch applies them:

    * Unset: every card. Empty, or starting with a negative number: none.
    * The first entry decides how the list is read: as numbers, as UUIDs (``GPU-...``) or as MIG slices
      (``MIG-...``). A UUID may be cut short as long as it fits one card only.
    * The first entry that names no card, and everything behind it, is ignored.
    * A card that is named twice leaves *no* card at all.
    * Of cards in MIG mode a process sees one slice, and then no whole card beside it.
    * With CUDA_DEVICE_ORDER=PCI_BUS_ID numbers are NVML's; else CUDA puts faster cards first, which is a guess
      here where the cards differ.

`visible_now` asks torch itself and matches by UUID, so that a guess never decides where torch can be asked. It
starts CUDA's driver and takes no memory on a card. The rules serve where torch can't tell, and for the words.

Rules: CUDA C++ Programming Guide, "CUDA Environment Variables"; MIG User Guide, "CUDA Device Enumeration".
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from manycard.cards.inventory import CardInfo, MigSlice

__all__ = ["Visible", "map_visible", "visible_now", "why_torch_sees_none"]

_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+")
_OLD_MIG_NAME = re.compile(r"MIG-(GPU-[0-9a-f-]+)/([0-9]+)/([0-9]+)")


@dataclass(frozen=True)
class Visible:
    """The cards that torch sees."""

    cards: tuple[CardInfo, ...]
    """In torch's order: place i is ``cuda:i``."""
    said: tuple[str, ...] = ()
    """What was ignored or guessed, and why; one sentence each, without its full stop."""


def map_visible(value: str | None, infos: Sequence[CardInfo], *, order: str | None = None) -> Visible:
    """Apply CUDA_VISIBLE_DEVICES to a machine's cards.

    Args:
        value: CUDA_VISIBLE_DEVICES; None where it is not set.
        infos: the machine's cards in NVML's order.
        order: CUDA_DEVICE_ORDER.

    Returns:
        the cards in torch's order, and what was ignored.

    Example:
        >>> one, two = CardInfo(0, "A", "GPU-1a", "01"), CardInfo(1, "A", "GPU-2b", "02")
        >>> [card.uuid for card in map_visible("1,0", [one, two]).cards]
        ['GPU-2b', 'GPU-1a']
        >>> map_visible("1,7,0", [one, two]).said
        ("CUDA_VISIBLE_DEVICES='1,7,0': '7' is no number of a card here; CUDA ignores it and what follows",)
    """
    cards, guess = _in_cuda_order(infos, order)
    if value is None:
        return _one_slice(cards, said=guess)
    if value.startswith("MIG-"):
        parts = [(card, part) for card in cards for part in card.slices]
        chosen, said = _follow(value, "MIG slice", _read_mig, lambda entry: _fitting_slices(entry, parts))
        return _one_slice(chosen, said=said)
    if value.startswith("GPU-"):
        chosen, said = _follow(value, "UUID", _read_uuid, lambda entry: _fitting_uuids(entry, cards))
        return _one_slice(chosen, said=said)
    chosen, said = _follow(value, "number", _read_number, lambda entry: cards[entry : entry + 1])
    return _one_slice(chosen, said=guess + said)


_Entry = TypeVar("_Entry", int, str)


def _follow(
    value: str, kind: str, read: Callable[[str], _Entry | None], fitting: Callable[[_Entry], list[CardInfo]]
) -> tuple[list[CardInfo], tuple[str, ...]]:
    """The cards that a list names, up to the first entry that names none.

    Args:
        value: the list.
        kind: what its entries are.
        read: an entry, or None where the text is none of that kind.
        fitting: the cards that an entry fits.
    """
    setting = f"CUDA_VISIBLE_DEVICES={value!r}"
    if value.strip() in ("", "-1"):
        return [], (f"{setting} hides every card",)
    texts = value.split(",")
    entries: list[_Entry] = []
    for text in texts:
        entry = read(text)
        if entry is None:
            break
        if entry in entries:  # looked for in the whole list, before any entry is looked up
            return [], (_twice(setting, text),)
        entries.append(entry)
    chosen: list[CardInfo] = []
    fits = 0
    for text, entry in zip(texts, entries, strict=False):
        cards = fitting(entry)
        fits = len(cards)
        if fits != 1:
            break
        if cards[0] in chosen:
            return [], (_twice(setting, text),)
        chosen += cards
    if len(chosen) == len(texts):
        return chosen, ()
    wrong = f"fits {fits} cards" if fits > 1 else f"is no {kind} of a card here"
    return chosen, (f"{setting}: {texts[len(chosen)]!r} {wrong}; CUDA ignores it and what follows",)


def _twice(setting: str, text: str) -> str:
    return f"{setting}: {text.strip()!r} is a card that was named before; CUDA then shows no card at all"


def _read_number(text: str) -> int | None:
    written = _WHOLE_NUMBER.match(text.strip())  # like C's strtoul: "1st" is 1
    return int(written[0]) if written and int(written[0]) >= 0 else None


def _read_uuid(text: str) -> str | None:
    return text if text.startswith("GPU-") else None


def _read_mig(text: str) -> str | None:
    return text if text.startswith("MIG-") else None


def _fitting_uuids(entry: str, cards: Sequence[CardInfo]) -> list[CardInfo]:
    return [card for card in cards if card.uuid.startswith(entry)]


def _fitting_slices(entry: str, parts: Sequence[tuple[CardInfo, MigSlice]]) -> list[CardInfo]:
    old = _OLD_MIG_NAME.fullmatch(entry)
    if old:  # drivers before R470: MIG-<UUID of the card>/<GPU instance>/<compute instance>
        place = (old[1], int(old[2]), int(old[3]))
        fits = [(c, part) for c, part in parts if (c.uuid, part.gpu_instance, part.compute_instance) == place]
    else:
        fits = [(card, part) for card, part in parts if part.uuid.startswith(entry)]
    return [card.as_slice(part) for card, part in fits]


def _one_slice(chosen: Sequence[CardInfo], said: tuple[str, ...]) -> Visible:
    """Show slices in place of cards in MIG mode, and keep the one that CUDA shows."""
    shown: list[CardInfo] = []
    for card in chosen:
        if not card.mig or card.slice_of:
            shown.append(card)
        elif card.slices:
            shown += [card.as_slice(part) for part in card.slices]
        else:
            said += (f"card {card.index} is in MIG mode and has no slice, so CUDA doesn't show it",)
    slices = [card for card in shown if card.slice_of]
    if slices and len(shown) > 1:
        said += (f"CUDA shows a process one MIG slice and nothing beside it: {slices[0].name}, {slices[0].uuid}",)
    return Visible(tuple(slices[:1] or shown), said)


def _in_cuda_order(infos: Sequence[CardInfo], order: str | None) -> tuple[list[CardInfo], tuple[str, ...]]:
    cards = sorted(infos, key=lambda card: card.index)
    if order == "PCI_BUS_ID" or len({card.name for card in cards}) < 2:
        return cards, ()
    speed = {card.index: (card.cores or 0) * (card.clock or 0) for card in cards}
    cards.sort(key=lambda card: -speed[card.index])
    return cards, (
        "the cards differ, so CUDA numbers them fastest first, which nvidia-smi doesn't: set "
        "CUDA_DEVICE_ORDER=PCI_BUS_ID for one numbering",
    )


def visible_now(infos: Sequence[CardInfo], why_none: str = "") -> Visible:
    """Ask torch which cards it sees, and match them with the machine's by UUID.

    Args:
        infos: the machine's cards, as `inventory` lists them; may be empty where NVML doesn't work.
        why_none: why `infos` is empty, for the words.

    Returns:
        the cards in torch's order. Where torch sees none, `said` tells why.
    """
    value, order = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")
    expected = map_visible(value, infos, order=order)
    if not torch.cuda.is_available():
        if infos and not expected.cards:
            return Visible((), expected.said)
        return Visible((), (*expected.said, why_torch_sees_none(infos, why_none)))
    try:
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except RuntimeError as failure:  # a process forked off one that had started CUDA, for instance
        reason = str(failure).strip().split("\n")[0].rstrip(".")
        return Visible(expected.cards, (*expected.said, f"torch can't tell which cards it sees: {reason}"))
    return match_properties(properties, infos, expected)


def match_properties(properties: Sequence[Any], infos: Sequence[CardInfo], expected: Visible) -> Visible:
    """Put torch's properties of its devices and NVML's cards together.

    Args:
        properties: of torch's devices in torch's order (``name``, ``total_memory``, ``uuid``).
        infos: the machine's cards.
        expected: what the rules lead one to expect; decides where a UUID fits nothing.
    """
    known = {_bare(card.uuid): card for card in infos if not card.mig}
    known |= {_bare(part.uuid): card.as_slice(part) for card in infos for part in card.slices}
    cards, said = [], list(expected.said)
    for index, device in enumerate(properties):
        card = known.get(_bare(str(getattr(device, "uuid", ""))))
        if card is None and len(expected.cards) == len(properties):
            card = expected.cards[index]
        if card is None:
            card = _from_torch(index, device)
            if infos:
                said.append(f"cuda:{index} ({device.name}) is no card that the driver's inventory lists")
        cards.append(card)
    if len(cards) > len(expected.cards) and any(card.slice_of for card in cards):
        said = [line for line in said if "one MIG slice" not in line]  # a driver without that limit
    return Visible(tuple(cards), tuple(said))


def _bare(uuid: str) -> str:
    """A UUID without NVML's prefix, as torch gives it."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _from_torch(index: int, device: Any) -> CardInfo:
    capability = (device.major, device.minor) if hasattr(device, "major") else None
    uuid = str(getattr(device, "uuid", ""))
    place = [getattr(device, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    return CardInfo(
        index=index,
        name=device.name,
        uuid=f"GPU-{uuid}" if uuid else f"cuda:{index}",
        pci_bus_id="" if -1 in place else "{:08X}:{:02X}:{:02X}.0".format(*place),
        memory_total=int(device.total_memory),
        capability=capability,
    )


def why_torch_sees_none(infos: Sequence[CardInfo], why_none: str = "") -> str:
    """Why torch has no card to use, in words."""
    if not infos:
        return why_none or "there is no GPU here"
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built for the CPU only, and this machine has {len(infos)} GPUs"
    return (
        f"torch {torch.__version__} (CUDA {torch.version.cuda}) can't use the GPUs here; most often the driver is "
        "older than torch's CUDA"
    )
