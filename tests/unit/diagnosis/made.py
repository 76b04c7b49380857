"""Made-up facts for probes and the doctor: a machine that is well, and what a test changes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from manycard.cards import CardInfo, Host, Links, Machine, choose, map_visible, parse_spec
from manycard.diagnosis import Facts, TorchFacts
from tests.unit.cards.machines import GIB, joined

HOST = Host(
    "box",
    cores=64,
    cores_total=64,
    memory_total=512 * GIB,
    memory_free=400 * GIB,
    shm_total=64 * GIB,
    shm_free=64 * GIB,
)
TORCH = TorchFacts("2.14.1+cu130", (13, 0), None, available=True, nccl="2.30.7", archs=("sm_80", "sm_90"), threads=32)


def made_facts(
    infos: Sequence[CardInfo],
    spec: str = "all",
    *,
    links: Links | None = None,
    torch: TorchFacts = TORCH,
    host: Host = HOST,
    driver_cuda: tuple[int, int] | None = (13, 0),
    environment: Mapping[str, str] | None = None,
    lost: tuple[str, ...] = (),
) -> Facts:
    """Facts of a machine with these cards, as `read_facts` would put them together."""
    environment = environment or {}
    why = "" if infos else "no NVIDIA driver is installed"
    driver = ("580.95.05", driver_cuda) if infos else (None, None)
    machine = Machine(tuple(infos), host, why, *driver, lost)
    visible = map_visible(environment.get("CUDA_VISIBLE_DEVICES"), infos)
    if not torch.available:
        visible = type(visible)((), visible.said)
    links = links or joined([range(8)])
    choice = choose(parse_spec(spec), visible.cards, links, said=visible.said)
    return Facts(machine, visible, links, choice, torch, frozenset(), environment)
