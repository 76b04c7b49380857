"""Probe: has the driver written errors of the hardware into the kernel's log?

Only errors that point to a card, its memory or its links count. Those that a program's own mistake causes (an illegal
address, 13 and 31) are left out.

Codes: NVIDIA, "XID Errors".
"""

from __future__ import annotations

from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding

__all__ = ["probe"]

_RESET = (
    "reset the card while it is free (nvidia-smi --gpu-reset), or restart the machine; have it replaced if it returns"
)
_MEANINGS = {
    48: ("an error of its memory that could not be corrected", _RESET),
    62: ("its power controller has stopped", _RESET),
    63: ("a row of its memory was put out of use, from the next reset on", _RESET),
    64: ("a row of its memory could not be put out of use", "have the card replaced"),
    74: (
        "an error of its NVLinks",
        "reseat the bridge or look at the NVSwitches (nvidia-smi nvlink -e), then reset the cards",
    ),
    79: (
        "it fell off the bus",
        "restart the machine; look at power cables, heat and the slot, and have the card replaced if it returns",
    ),
    92: ("many errors of its memory, which were corrected", "watch it: nvidia-smi -q -d ECC"),
    94: ("an error of its memory that ended one program", _RESET),
    95: ("an error of its memory that may have spoilt every program on it", _RESET),
    119: ("its system processor (GSP) doesn't answer", "restart the machine, and update the driver if it returns"),
    120: ("an error of its system processor (GSP)", "restart the machine, and update the driver if it returns"),
}


def probe(facts: Facts) -> list[Finding]:
    """Find errors of the hardware, one finding a card and code."""
    names = {_place(info.pci_bus_id): name for name, info in facts.chosen}
    names = {_place(info.pci_bus_id): f"card {info.index}" for info in facts.machine.cards} | names
    counts: dict[tuple[str, int], list[str]] = {}
    for each in facts.surroundings.xids:
        if each.code in _MEANINGS:
            counts.setdefault((_place(each.bus), each.code), []).append(each.text)
    return [
        Finding(
            cause=f"the driver has reported of {names.get(place, f'the card at {place}')}: {_MEANINGS[code][0]}",
            evidence=f"Xid {code} in the kernel's log, {len(texts)} time{'s'[: len(texts) > 1]}; the last: "
            + (texts[-1] or "no words"),
            fix=_MEANINGS[code][1],
            severity="warning",
        )
        for (place, code), texts in counts.items()
    ]


def _place(bus: str) -> str:
    """Domain, bus and device, as both the driver (eight digits, a function) and the kernel write them."""
    parts = bus.split(".")[0].lower().split(":")
    return ":".join([parts[0][-4:], *parts[1:]]) if parts[0] else bus
