"""Made-up facts for probes and the doctor: a machine that is well, and what a test changes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from manycard.cards import (
    CardHealth,
    CardInfo,
    Ecc,
    Host,
    Links,
    Machine,
    Network,
    NvLinkState,
    Pcie,
    Surroundings,
    choose,
    map_visible,
    parse_spec,
)
from manycard.diagnosis import Facts, Measured, TorchFacts
from manycard.diagnosis.measured import AllReduce, Copy, HostCopy, Load
from tests.unit.cards.machines import GIB, NVLINK, card, joined

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
HEALTH = CardHealth(
    reasons=("idle",),
    sm_clock=345,
    sm_clock_max=1980,
    application_clock=1980,
    application_clock_default=1980,
    power_cap=700.0,
    power_default=700.0,
    temperature=31,
    slows_at=87,
    ecc=Ecc(True, True, 0, 0, 0, False, False, 0, None, None),
    persistence=True,
    display=False,
    compute_mode="default",
    mig_pending=False,
    pcie=Pcie(generation=1, width=16, generation_max=5, width_max=16, replays=0),
    nvlinks=tuple(NvLinkState(number, True) for number in range(18)),
    fabric="completed",
    fabric_status=0,
    numa_node=0,
)
"""An idle H200 that is well; its PCIe link sleeps in generation 1."""
ETH, LO = Network("eth0", True, "10.0.0.5"), Network("lo", True, "127.0.0.1")
SURROUNDINGS = Surroundings(
    open_files=1_048_576,
    open_files_most=1_048_576,
    locked_memory=None,
    cpus=frozenset(range(64)),
    nodes={0: frozenset(range(32)), 1: frozenset(range(32, 64))},
    governor="performance",
    iommu="passthrough",
    acs=(),
    virtual=False,
    networks=(ETH, LO, Network("docker0", True, "172.17.0.1", bridge=True), Network("eth1", False)),
    infiniband=("mlx5_0",),
    name_resolves=True,
    cards_on_bus=8,
)


def measured(count: int) -> Measured:
    """What a machine of `count` H200 that are well measures."""
    names = [f"cuda:{index}" for index in range(count)]
    return Measured(
        tuple(Copy(a, b, 392.0, 9.0, 0, 1 << 28, True) for a in names for b in names if a != b),
        tuple(HostCopy(name, 55.0, 54.0, 11.0, 5, 16) for name in names),
        (AllReduce(1 << 20, 47.0, 22.0), AllReduce(500 << 20, 1700.0, 308.0)) if count > 1 else (),
        tuple(Load(name, ("power cap",), 1755, 690.0, 58, 720.0) for name in names),
    )


def well(count: int = 2, **changed: object) -> Facts:
    """Facts of a machine of `count` H200 on which everything could be read and measured, and is well."""
    infos = [card(index) for index in range(count)]
    infos = [replace(info, capability=(9, 0)) for info in infos]
    facts = replace(
        made_facts(
            infos,
            links=joined([range(8)], replace(NVLINK, gb_per_s=478.1)),
            torch=replace(TORCH, nccl_packaged="2.30.7"),
            environment=changed.pop("environment", None),
        ),
        health={info.index: HEALTH for info in infos},
        surroundings=SURROUNDINGS,
        measured=measured(count),
    )
    return replace(facts, **changed)


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
