"""The links between cards: NVLink direct and through switches, PCIe levels, P2P that is refused."""

from __future__ import annotations

import pynvml

from manycard.cards.inventory import read_machine
from manycard.cards.links import Links, links
from tests.unit.cards.fake_nvml import FakeCard, FakeNvml

GPU, SWITCH = pynvml.NVML_NVLINK_DEVICE_TYPE_GPU, pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
READ, NVLINK = 0, pynvml.NVML_P2P_CAPS_INDEX_NVLINK


def machine(count: int, **more: object) -> FakeNvml:
    return FakeNvml([FakeCard(uuid=f"GPU-{i}", bus=f"00000000:{i + 1:02X}:00.0", **more) for i in range(count)])


def pair(nvml: FakeNvml, one: int, other: int) -> frozenset[str]:
    return frozenset({nvml.cards[one].uuid, nvml.cards[other].uuid})


def test_direct_nvlinks_are_counted_per_pair():
    nvml = machine(3)
    buses = [card.bus for card in nvml.cards]
    nvml.cards[0].nvlinks = {0: (buses[1], GPU), 1: (buses[1], GPU), 2: (buses[2], GPU)}
    nvml.cards[1].nvlinks = {0: (buses[0], GPU), 1: (buses[0], GPU)}
    nvml.cards[2].nvlinks = {4: (buses[0], GPU)}
    for one, other in ((0, 1), (0, 2), (1, 2)):
        nvml.levels[pair(nvml, one, other)] = pynvml.NVML_TOPOLOGY_SYSTEM
        nvml.p2p[pair(nvml, one, other), READ] = pynvml.NVML_P2P_STATUS_OK
    nvml.p2p[pair(nvml, 1, 2), NVLINK] = pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
    cards = read_machine(nvml).cards
    found = links(cards, nvml).matrix(cards)
    assert [[link.kind for link in row] for row in found] == [
        ["SELF", "NV2", "NV1"],
        ["NV2", "SELF", "SYS"],
        ["NV1", "SYS", "SELF"],
    ]
    assert found[0][1].rank < found[0][2].rank < found[1][2].rank
    assert found[0][1].gb_per_s == 2 * 26.562
    assert nvml.started == 0


def test_nvlinks_through_switches_of_which_only_p2p_tells():
    nvml = machine(2)
    for card in nvml.cards:  # as in a virtual machine: the far end is hidden
        card.nvlinks = dict.fromkeys(range(18), ("", pynvml.NVML_NVLINK_DEVICE_TYPE_UNKNOWN))
    nvml.p2p[pair(nvml, 0, 1), NVLINK] = pynvml.NVML_P2P_STATUS_OK
    cards = read_machine(nvml).cards
    link = links(cards, nvml).between(cards[1], cards[0])
    assert (link.kind, link.nvlinks, link.p2p) == ("NV18", 18, None)
    assert round(link.gb_per_s or 0) == 478


def test_nvlinks_to_switches_where_p2p_does_not_tell():
    nvml = machine(2)
    nvml.cards[0].nvlinks = dict.fromkeys(range(12), ("00000000:99:00.0", SWITCH))
    nvml.cards[1].nvlinks = dict.fromkeys(range(8), ("00000000:99:00.0", SWITCH))
    cards = read_machine(nvml).cards
    assert links(cards, nvml).between(*cards).kind == "NV8"


def test_pcie_levels_rank_from_near_to_far():
    levels = {
        "BOARD": pynvml.NVML_TOPOLOGY_INTERNAL,
        "PIX": pynvml.NVML_TOPOLOGY_SINGLE,
        "PXB": pynvml.NVML_TOPOLOGY_MULTIPLE,
        "PHB": pynvml.NVML_TOPOLOGY_HOSTBRIDGE,
        "NODE": pynvml.NVML_TOPOLOGY_NODE,
        "SYS": pynvml.NVML_TOPOLOGY_SYSTEM,
    }
    ranks = []
    for kind, level in levels.items():
        nvml = machine(2)
        nvml.levels[pair(nvml, 0, 1)] = level
        cards = read_machine(nvml).cards
        link = links(cards, nvml).between(*cards)
        assert link.kind == kind
        ranks.append(link.rank)
    assert ranks == sorted(set(ranks))


def test_refused_p2p_ranks_behind_every_link_that_has_it():
    nvml = machine(3)
    nvml.levels = {
        pair(nvml, 0, 1): pynvml.NVML_TOPOLOGY_SINGLE,
        pair(nvml, 0, 2): pynvml.NVML_TOPOLOGY_SYSTEM,
    }
    nvml.p2p = {
        (pair(nvml, 0, 1), READ): pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED,
        (pair(nvml, 0, 2), READ): pynvml.NVML_P2P_STATUS_OK,
    }
    cards = read_machine(nvml).cards
    found = links(cards, nvml)
    refused, far = found.between(cards[0], cards[1]), found.between(cards[0], cards[2])
    assert (refused.p2p, far.p2p) == (False, True)
    assert "chipset" in refused.why_no_p2p
    assert refused.rank > far.rank


def test_what_is_not_told_is_unknown_and_never_an_error():
    nvml = machine(2, unsupported={"nvmlDeviceGetNvLinkState"})
    cards = read_machine(nvml).cards
    link = links(cards, nvml).between(*cards)
    assert (link.kind, link.p2p) == ("unknown", None)
    no_driver = FakeNvml(init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert links(cards, no_driver).between(*cards).kind == "unknown"
    assert links([], no_driver) == Links({})
