"""Made-up machines for tests that choose cards: what is known of each card, and the links between them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from manycard.cards import CardInfo, CardProcess, Link, Links, MigSlice

GIB = 1024**3
NVLINK = Link("NV18", 22, "18 NVLinks", p2p=True, nvlinks=18)
HOST = Link("PHB", 44, "one PCIe host bridge", p2p=True)
NUMA = Link("SYS", 46, "the link between NUMA nodes", p2p=True)

KINDS = {"H200": (141, 16_896, 1980), "A100": (80, 6_912, 1410), "T4": (15, 2_560, 1590)}


def card(
    index: int, kind: str = "H200", *, free: float | None = None, processes: Iterable[CardProcess] = ()
) -> CardInfo:
    memory, cores, clock = KINDS[kind]
    return CardInfo(
        index,
        f"NVIDIA {kind}",
        f"GPU-{index:04x}a1b2-0000-0000-0000-{index:012x}",
        f"00000000:{index + 1:02X}:00.0",
        memory_total=memory * GIB,
        memory_free=int((memory if free is None else free) * GIB),
        processes=tuple(processes),
        mig=False,
        cores=cores,
        clock=clock,
    )


def sliced(index: int, count: int) -> CardInfo:
    """An A100 in MIG mode with `count` slices."""
    whole = card(index, "A100")
    parts = tuple(
        MigSlice(f"MIG-{index:04x}{part:04x}-5555", "NVIDIA A100 MIG 1g.10gb", 10 * GIB, 9 * GIB, part + 7, 0)
        for part in range(count)
    )
    return CardInfo(**{**whole.__dict__, "mig": True, "slices": parts})


def stranger(pid: int = 4242, memory: int = 30 * GIB) -> CardProcess:
    return CardProcess(pid, memory, user="someone", command="python train.py")


def joined(groups: Iterable[Iterable[int]], inside: Link = NVLINK, outside: Link = NUMA, count: int = 8) -> Links:
    """Links `inside` each group of card numbers, and `outside` between groups."""
    sets = [set(group) for group in groups]
    return Links(
        {
            (one, other): inside if any({one, other} <= group for group in sets) else outside
            for one, other in combinations(range(count), 2)
        }
    )
