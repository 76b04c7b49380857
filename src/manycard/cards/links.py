"""How the cards of a machine are joined: NVLink, PCIe switches, or through the host.

Behaviour:
    * A link is known between every two cards, in one direction as in the other. What NVML doesn't tell (a
      virtual machine often hides it) is an unknown link, never an error.
    * `Link.rank` orders links from fast to slow, so that choosing cards needs no knowledge of kinds. It is an
      order, not a speed.
    * Peer-to-peer (P2P) that is refused costs a link its place behind all links that have it: data then goes
      through the host's memory, whatever lies between the cards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import pynvml

from manycard.cards.inventory import CardInfo
from manycard.cards.nvml import Session, session

__all__ = ["Link", "Links", "links"]

_MOST_NVLINKS = 40
_NO_P2P = 100
_P2P_READ = 0
"""NVML_P2P_CAPS_INDEX_READ. nvidia-ml-py has it as the tuple ``(0,)``, which its own function refuses."""

_TOPOLOGY = {
    0: ("BOARD", _MOST_NVLINKS + 1, "one board"),
    10: ("PIX", _MOST_NVLINKS + 2, "one PCIe switch"),
    20: ("PXB", _MOST_NVLINKS + 3, "several PCIe switches"),
    30: ("PHB", _MOST_NVLINKS + 4, "one PCIe host bridge"),
    40: ("NODE", _MOST_NVLINKS + 5, "host bridges of one NUMA node"),
    50: ("SYS", _MOST_NVLINKS + 6, "the link between NUMA nodes"),
}
"""NVML's level of the nearest common ancestor -> kind, rank, words."""

_P2P_STATUS = {
    1: "the chipset doesn't support it",
    2: "the cards don't support it",
    3: "the host's PCIe topology doesn't support it",
    4: "it is switched off in the driver's settings",
    5: "it is not supported",
}


@dataclass(frozen=True)
class Link:
    """What joins two cards."""

    kind: str
    """``NV18`` (18 NVLinks), ``BOARD``, ``PIX``, ``PXB``, ``PHB``, ``NODE``, ``SYS``, ``SELF`` or ``unknown``."""
    rank: int
    """Place from fast to slow; lower is faster, 0 is the card itself."""
    words: str = ""
    """What the data goes through."""
    p2p: bool | None = None
    """Whether one card can read the other's memory; None where the driver doesn't say."""
    why_no_p2p: str = ""
    """The driver's reason where `p2p` is False."""
    nvlinks: int = 0
    """Number of NVLinks."""
    gb_per_s: float | None = None
    """Bandwidth of the NVLinks together, 10^9 bytes a second in one direction; None for other kinds."""


_SELF = Link("SELF", 0, "one card")
_UNKNOWN = Link("unknown", _MOST_NVLINKS + 7, "what lies between is not known")


@dataclass(frozen=True)
class Links:
    """The links between a machine's cards."""

    pairs: Mapping[tuple[int, int], Link]
    """NVML's indices of two cards, the lower first -> their link."""

    def between(self, one: CardInfo, other: CardInfo) -> Link:
        """The link between two cards; the same whichever is named first."""
        if one.index == other.index:
            return _SELF
        return self.pairs.get((min(one.index, other.index), max(one.index, other.index)), _UNKNOWN)

    def matrix(self, infos: Sequence[CardInfo]) -> list[list[Link]]:
        """The links of some cards, in their order; symmetric."""
        return [[self.between(one, other) for other in infos] for one in infos]


@dataclass(frozen=True)
class _NvLinks:
    """The active NVLinks of one card."""

    ends: tuple[str, ...]
    """The PCI bus id at the other end of each; empty where the driver doesn't say."""
    to_switch: int
    """How many end at an NVSwitch."""
    mb_per_s: int | None
    """Speed of one in one direction."""


def links(infos: Sequence[CardInfo], api: Any = pynvml) -> Links:
    """Read the links between cards.

    Args:
        infos: cards as `inventory` lists them, or slices of them.
        api: NVML's functions; a test hands in its own.
    """
    cards = {card.index: card for card in infos}
    with session(api) as nvml:
        handles = {index: nvml.ask("nvmlDeviceGetHandleByIndex", index) for index in cards}
        nvlinks = {index: _read_nvlinks(nvml, handle) for index, handle in handles.items() if handle is not None}
        pairs = {}
        for one, other in combinations(sorted(nvlinks), 2):
            both = (cards[one], cards[other])
            pairs[one, other] = _read_link(nvml, both, (handles[one], handles[other]), (nvlinks[one], nvlinks[other]))
        return Links(pairs)


def _read_link(
    nvml: Session, cards: tuple[CardInfo, CardInfo], handles: tuple[Any, Any], nvlinks: tuple[_NvLinks, _NvLinks]
) -> Link:
    level = nvml.ask("nvmlDeviceGetTopologyCommonAncestor", *handles)
    kind, rank, words = _TOPOLOGY.get(level, (_UNKNOWN.kind, _UNKNOWN.rank, _UNKNOWN.words))
    link = Link(kind, rank, words)
    count = _count_nvlinks(nvml, cards, handles, nvlinks)
    if count:
        speed = nvlinks[0].mb_per_s or nvlinks[1].mb_per_s
        total = count * speed / 1000 if speed else None
        link = Link(f"NV{count}", _MOST_NVLINKS - count, f"{count} NVLinks", nvlinks=count, gb_per_s=total)
    status = nvml.ask("nvmlDeviceGetP2PStatus", *handles, _P2P_READ)
    if status == nvml.api.NVML_P2P_STATUS_OK:
        return replace(link, p2p=True)
    if status in _P2P_STATUS:
        return replace(link, p2p=False, why_no_p2p=_P2P_STATUS[status], rank=link.rank + _NO_P2P)
    return link


def _count_nvlinks(
    nvml: Session, cards: tuple[CardInfo, CardInfo], handles: tuple[Any, Any], nvlinks: tuple[_NvLinks, _NvLinks]
) -> int:
    """NVLinks between two cards, direct or through NVSwitches."""
    direct = nvlinks[0].ends.count(cards[1].pci_bus_id) if cards[1].pci_bus_id else 0
    if direct:
        return direct
    # A virtual machine hides the switches; the driver still tells whether P2P goes over NVLink.
    over_nvlink = nvml.ask("nvmlDeviceGetP2PStatus", *handles, nvml.api.NVML_P2P_CAPS_INDEX_NVLINK)
    if over_nvlink == nvml.api.NVML_P2P_STATUS_OK:
        return min(len(nvlinks[0].ends), len(nvlinks[1].ends))
    return min(nvlinks[0].to_switch, nvlinks[1].to_switch) if over_nvlink is None else 0


def _read_nvlinks(nvml: Session, handle: Any) -> _NvLinks:
    ends: list[str] = []
    to_switch = 0
    first = None
    for number in range(nvml.api.NVML_NVLINK_MAX_LINKS):
        if nvml.ask("nvmlDeviceGetNvLinkState", handle, number) != nvml.api.NVML_FEATURE_ENABLED:
            continue
        first = number if first is None else first
        end = nvml.ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, number)
        ends.append(end.busId if end is not None else "")
        kind = nvml.ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, number)
        to_switch += kind == nvml.api.NVML_NVLINK_DEVICE_TYPE_SWITCH
    return _NvLinks(tuple(ends), to_switch, None if first is None else _read_speed(nvml, handle, first))


def _read_speed(nvml: Session, handle: Any, number: int) -> int | None:
    """Megabytes a second over one NVLink in one direction; newer cards answer the second question only."""
    for field in (nvml.api.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON, (nvml.api.NVML_FI_DEV_NVLINK_GET_SPEED, number)):
        answer = nvml.ask("nvmlDeviceGetFieldValues", handle, [field])
        if answer is not None and answer[0].nvmlReturn == nvml.api.NVML_SUCCESS and answer[0].value.uiVal:
            return int(answer[0].value.uiVal)
    return None
