"""Each fault planted into a machine that is well is the one thing found, with its figures; without it, nothing is."""

# ruff: noqa: E501 (a fault a line)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from manycard.cards import CardProcess, Ecc, Network, NvLinkState, Xid
from manycard.diagnosis import Facts, Measured, diagnose
from manycard.diagnosis.measured import AllReduce, Copy
from manycard.diagnosis.probes import nvlinks
from tests.unit.cards.machines import HOST as HOST_BRIDGE
from tests.unit.cards.machines import card, joined
from tests.unit.diagnosis.made import HEALTH, HOST, SURROUNDINGS, TORCH, made_facts, measured, well

GIB = 1024**3


def sick(**changed: object) -> Facts:
    """Two cards, the second with this health."""
    return well(health={0: HEALTH, 1: replace(HEALTH, **changed)})


def memory(**changed: object) -> Facts:
    return sick(ecc=replace(HEALTH.ecc, **changed))


def around(**changed: object) -> Facts:
    return well(surroundings=replace(SURROUNDINGS, **changed))


def variables(count: int = 2, **environment: str) -> Facts:
    return well(count, environment=environment)


def found(**changed: object) -> Facts:
    return well(measured=replace(measured(2), **changed))


def loaded(**changed: object) -> Facts:
    loads = measured(2).loads
    return found(loads=(loads[0], replace(loads[1], **changed)))


def copied(index: int, **changed: object) -> Facts:
    copies = list(measured(2).copies)
    copies[index] = replace(copies[index], **changed)
    return found(copies=tuple(copies))


def host_copied(**changed: object) -> Facts:
    copies = measured(2).host_copies
    return found(host_copies=(copies[0], replace(copies[1], **changed)))


def on_pcie(**changed: object) -> Facts:
    """Two cards under one host bridge, without NVLink and unmeasured."""
    facts = well(links=joined([range(2)], HOST_BRIDGE), measured=measured(1))
    return replace(facts, surroundings=replace(SURROUNDINGS, **changed), health={})


def with_torch(**changed: object) -> Facts:
    return well(torch=replace(TORCH, nccl_packaged="2.30.7", **changed))


def with_host(**changed: object) -> Facts:
    facts = well()
    return replace(facts, machine=replace(facts.machine, host=replace(HOST, **changed)))


def without_cards(why: str, on_bus: int) -> Facts:
    facts = made_facts([])
    machine = replace(facts.machine, why_none=why)
    return replace(facts, machine=machine, surroundings=replace(SURROUNDINGS, cards_on_bus=on_bus))


DOWN = tuple(NvLinkState(number, number < 16) for number in range(18))
NOISY = (NvLinkState(0, True, {"replays": 4321}), *HEALTH.nvlinks[1:])
SLOW_SUMS = (AllReduce(1 << 20, 47.0, 22.0), AllReduce(500 << 20, 50_000.0, 10.5))
STAGE = "starting NCCL on cuda:0, cuda:1"

# (name, facts, severity, words of the cause, words of the evidence)
PLANTED: list[tuple[str, Callable[[], Facts], str, str, str]] = [
    ("heat under load", lambda: loaded(reasons=("heat (software)",)), "warning", "cuda:1 is too hot", "1755 of 1980 MHz"),
    ("heat at rest", lambda: sick(reasons=("heat (hardware)", "hardware slowdown")), "warning", "too hot", "heat (hardware)"),
    ("power brake", lambda: loaded(reasons=("power brake", "hardware slowdown")), "warning", "brake", "under load"),
    ("hardware slowdown", lambda: sick(reasons=("hardware slowdown",)), "warning", "by its hardware", "345 of 1980"),
    ("sync boost", lambda: sick(reasons=("sync boost",)), "note", "sync-boost", "sync boost"),
    ("display clocks", lambda: sick(reasons=("display clocks",)), "note", "for a screen", "display clocks"),
    ("clocks set low", lambda: sick(application_clock=1200), "warning", "clocks set lower", "1200 MHz, by default 1980"),
    ("nearly too hot", lambda: loaded(temperature=85), "warning", "nearly as hot", "85 °C; it lowers its clocks at 87"),
    ("one card slower", lambda: loaded(teraflops=400.0), "warning", "cuda:1 computes slower than cuda:0", "400"),
    ("power cap", lambda: sick(power_cap=350.0), "warning", "power cap is lower", "350 W, by default 700 W"),
    ("uncorrected errors", lambda: memory(uncorrected=3, uncorrected_ever=9), "error", "can't be trusted", "3 uncorrected"),
    ("errors long ago", lambda: memory(uncorrected_ever=2), "note", "in its life", "2 uncorrected"),
    ("many corrected", lambda: memory(corrected=5000), "note", "many errors, which are corrected", "5,000"),
    ("remap failed", lambda: memory(remap_failed=True, rows_remapped=8), "error", "can't replace a bad row", "8 rows"),
    ("remap pending", lambda: memory(remap_pending=True), "warning", "a row to be replaced", "pending"),
    ("page pending", lambda: memory(retire_pending=True), "warning", "a page to be taken out", "pending"),
    ("many pages retired", lambda: memory(pages_retired=63), "warning", "as many pages", "63 pages"),
    ("ECC off", lambda: sick(ecc=Ecc(on=False, pending=False)), "note", "without error correction", "is off"),
    ("ECC pending", lambda: memory(pending=False), "note", "(ECC) changes", "on now and will be off"),
    ("persistence", lambda: sick(persistence=False), "note", "driver is unloaded", "cuda:1"),
    ("screen", lambda: sick(display=True), "note", "drives a screen", "display is active"),
    ("prohibited", lambda: sick(compute_mode="prohibited"), "error", "lets no process compute", "prohibited"),
    ("exclusive", lambda: sick(compute_mode="exclusive process"), "note", "one process at a time", "exclusive process"),
    ("MIG pending", lambda: sick(mig_pending=True), "note", "MIG mode changes", "off now and will be on"),
    ("NVLinks down", lambda: sick(nvlinks=DOWN), "warning", "cuda:1 has NVLinks that are down", "16 of its 18"),
    (
        "NVLinks down everywhere",
        lambda: well(health={0: replace(HEALTH, nvlinks=DOWN), 1: replace(HEALTH, nvlinks=DOWN)}),
        "note",
        "some NVLinks of all cards are down",
        "16 of 18",
    ),
    ("NVLink errors", lambda: sick(nvlinks=NOISY), "warning", "NVLinks make errors", "4,321 replays"),
    ("narrow at rest", lambda: replace(sick(pcie=replace(HEALTH.pcie, width=4)), measured=Measured()), "warning", "PCIe link is slower", "4 of 16 lanes"),
    ("old generation", lambda: host_copied(generation=3, to_card=13.0, from_card=13.0), "warning", "PCIe link", "3 of 5"),
    ("replays", lambda: sick(pcie=replace(HEALTH.pcie, replays=99_999)), "warning", "repeats packets", "99,999"),
    ("slow from host", lambda: host_copied(to_card=9.0), "warning", "between the host and cuda:1", "9.0 GB/s to the card"),
    ("unequal from host", lambda: host_copied(to_card=32.5), "warning", "reaches cuda:1 more slowly", "32.5 GB/s"),
    ("corrupt copies", lambda: copied(1, wrong_bytes=512), "error", "arrive wrong", "cuda:1 to cuda:0: 512 bytes"),
    ("P2P refused by CUDA", lambda: copied(0, peer=False), "warning", "CUDA refuses direct access", "cuda:0 to cuda:1"),
    ("Xid 79", lambda: around(xids=(Xid(79, "0000:02:00", "GPU has fallen off"),)), "warning", "of cuda:1: it fell off the bus", "Xid 79 in the kernel's log, 1 time;"),
    ("Xid 95 twice", lambda: around(xids=(Xid(95, "0000:09:00"),) * 2), "warning", "of the card at 0000:09:00", "2 times"),
    ("slow copies", lambda: copied(0, gb_per_s=40.0), "warning", "from cuda:0 to cuda:1 are much slower", "40.0 GB/s"),
    (
        "slow copies both ways",
        lambda: found(copies=tuple(replace(copy, gb_per_s=40.0) for copy in measured(2).copies), all_reduces=()),
        "warning",
        "copies between cards are much slower",
        "cuda:1 to cuda:0",
    ),
    ("late copies", lambda: copied(0, latency_us=900.0), "note", "take long to start", "900 us"),
    ("hang", lambda: found(hung_at=STAGE, all_reduces=()), "error", "starting NCCL on cuda:0, cuda:1 hangs", "helps"),
    ("failure", lambda: found(failed_at=STAGE, failure="system error"), "error", "NCCL on cuda:0, cuda:1 fails", "system"),
    ("wrong sums", lambda: found(all_reduces=(AllReduce(1 << 20, 47.0, 22.0, False),)), "error", "wrong sums", "1 MiB"),
    ("slow all-reduce", lambda: found(all_reduces=SLOW_SUMS), "warning", "all-reduce is much slower", "10.5 GB/s"),
    ("ACS", lambda: on_pcie(acs=("0000:00:01.0",)), "warning", "through the host (ACS)", "0000:00:01.0"),
    ("IOMMU", lambda: on_pcie(iommu="translating"), "note", "IOMMU translates", "cuda:0-cuda:1"),
    ("NUMA", lambda: around(cpus=frozenset(range(32, 64))), "warning", "cores next to some", "cores of node 1 only"),
    ("open files", lambda: around(open_files=256), "warning", "few files may be open", "ulimit -n is 256"),
    ("open files, hard", lambda: around(open_files=256, open_files_most=300), "warning", "few files", "300 is the most"),
    ("locked memory", lambda: around(locked_memory=65536), "warning", "may be locked for InfiniBand", "mlx5_0"),
    ("little memory", lambda: with_host(memory_free=3 * GIB), "warning", "little free memory", "3.0 GiB free"),
    ("governor", lambda: around(governor="powersave"), "note", "cores save power", "powersave"),
    ("threads", lambda: with_host(cores=8), "warning", "more threads than the cores", "32 threads"),
    ("threads, word", lambda: variables(OMP_NUM_THREADS="many"), "warning", "no number of threads", "'many'"),
    ("other NCCL", lambda: with_torch(nccl="2.21.5"), "warning", "another NCCL is loaded", "loaded: 2.21.5"),
    ("shadowed", lambda: around(shadowing=("/usr/lib/libcudnn.so.8",)), "note", "stand in", "libcudnn.so.8"),
    ("broken driver", lambda: without_cards("the machine not restarted since", 2), "error", "was updated", "restarted"),
    ("driver not loaded", lambda: without_cards("installed but not loaded", 2), "error", "modprobe", "loaded"),
    ("broken NVML", lambda: without_cards("library did not start: x", 2), "error", "answers with an error", "2 NVIDIA"),
    ("no driver", lambda: without_cards("no NVIDIA driver is installed", 2), "warning", "nothing here can use", "2 on"),
    ("order", lambda: variables(CUDA_DEVICE_ORDER="PCI"), "warning", "no order that CUDA knows", "'PCI'"),
    ("NCCL file", lambda: around(nccl_files={"/etc/nccl.conf": {"NCCL_X": "1"}}), "note", "a file sets", "NCCL_X=1"),
]  # fmt: skip

VARIABLES = [
    ({"NCCL_P2P_DISABLE": "1"}, "warning", "direct access between cards (P2P) is switched off", "cuda:0-cuda:1"),
    ({"NCCL_P2P_LEVEL": "LOC"}, "warning", "keeps pairs of cards", "cuda:0-cuda:1 (NV18)"),
    ({"NCCL_P2P_LEVEL": "FAST"}, "warning", "holds no level", "FAST"),
    ({"NCCL_SHM_DISABLE": "1"}, "warning", "may not use shared memory", "NCCL_SHM_DISABLE=1"),
    ({"NCCL_IB_DISABLE": "1"}, "note", "InfiniBand is switched off though it is there", "mlx5_0"),
    ({"NCCL_DEBUG": "INFO"}, "note", "NCCL prints what it does", "NCCL_DEBUG=INFO"),
    ({"NCCL_PROTO": "LL"}, "warning", "NCCL_PROTO forces one choice", "NCCL_PROTO=LL"),
    ({"NCCL_ALGO": "Tree"}, "warning", "NCCL_ALGO forces one choice", "NCCL_ALGO=Tree"),
    ({"NCCL_MAX_NCHANNELS": "2"}, "warning", "too few blocks", "NCCL_MAX_NCHANNELS=2"),
    ({"NCCL_MAX_NCHANNELS": "two"}, "warning", "holds no whole number", "two"),
    ({"NCCL_CHECK_POINTERS": "1"}, "warning", "checks every pointer", "=1"),
    ({"NCCL_TOPO_FILE": "/x"}, "warning", "topology by a file", "/x"),
    ({"NCCL_P2P_DISABEL": "1"}, "warning", "no variable that NCCL reads", "NCCL_P2P_DISABLE"),
    ({"NCCL_BLOCKING_WAIT": "1"}, "note", "whose name has changed", "NCCL_BLOCKING_WAIT=1"),
    ({"NCCL_TIMEOUT": "3600"}, "warning", "sets no time limit", "3600"),
    ({"NCCL_BUFFSIZE": "8388608"}, "note", "it sets the buffer between two cards", "8388608"),
    ({"NCCL_SOCKET_IFNAME": "ens5"}, "error", "names no network interface", "eth0 (10.0.0.5)"),
    ({"NCCL_SOCKET_IFNAME": "=eth"}, "error", "names no network interface", "=eth"),
    ({"NCCL_SOCKET_IFNAME": "eth1"}, "error", "down or has no address", "eth1 is down"),
    ({"GLOO_SOCKET_IFNAME": "eth"}, "error", "GLOO_SOCKET_IFNAME names no network interface", "eth"),
    (
        {
            "NCCL_SOCKET_IFNAME": "docker0",
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "RANK": "0",
            "TORCHELASTIC_RUN_ID": "x",
        },
        "error",
        "doesn't leave this machine",
        "docker0 (172.17.0.1)",
    ),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "warning", "wait for ranks that nobody has started", "MASTER_ADDR"),
    ({"LOCAL_WORLD_SIZE": "4"}, "error", "more ranks than cards", "torch sees 2 cards"),
    ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments=True"}, "error", "can't read PYTORCH_CUDA_ALLOC_CONF", "colon"),
    ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segment:True"}, "error", "can't read", "'expandable_segment' is no"),
    ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:true"}, "error", "can't read", "'true'"),
    ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:10"}, "error", "can't read PYTORCH_ALLOC_CONF", "above 20"),
    ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:32"}, "warning", "may not split blocks", "32"),
    ({"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:80"}, "error", "can't read", "between 0 and 1"),
    ({"PYTORCH_ALLOC_CONF": "backend:cuda"}, "error", "can't read", "the backend is 'cuda'"),
    (
        {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync,expandable_segments:True"},
        "warning",
        "are ignored with backend",
        "ignored: expandable_segments",
    ),
    (
        {"PYTORCH_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:512"},
        "note",
        "hardly matters",
        "both are set",
    ),
    (
        {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
        "warning",
        "told two things",
        "False",
    ),
    ({"CUDA_LAUNCH_BLOCKING": "1"}, "warning", "every kernel is waited for", "CUDA_LAUNCH_BLOCKING=1"),
    ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "warning", "asks the driver for each piece", "=1"),
    ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "warning", "checks every collective", "DETAIL"),
    ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, "warning", "nothing overlaps", "=1"),
    ({"TORCH_COMPILE_DISABLE": "1"}, "warning", "torch.compile does nothing", "=1"),
    ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "warning", "one queue only", "=1"),
    ({"NVIDIA_TF32_OVERRIDE": "0"}, "warning", "TF32 is forced", "=0"),
    ({"CUDA_VISIBLE_DEVICES": "0,0"}, "error", "names a card twice", "'0,0'"),
]


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_a_machine_that_is_well_in_all_that_can_be_known_has_no_findings(count: int):
    assert [str(finding) for finding in diagnose(well(count))] == []


@pytest.mark.parametrize(
    ("make", "severity", "cause", "evidence"), [row[1:] for row in PLANTED], ids=[r[0] for r in PLANTED]
)
def test_a_planted_fault_is_the_one_that_is_found(
    make: Callable[[], Facts], severity: str, cause: str, evidence: str
):  # fmt: skip
    findings = diagnose(make())
    assert len(findings) == 1, [str(finding) for finding in findings]
    assert findings[0].severity == severity
    assert cause in findings[0].cause + findings[0].fix
    assert evidence in findings[0].evidence + findings[0].fix


@pytest.mark.parametrize(
    ("environment", "severity", "cause", "evidence"), VARIABLES, ids=[str(r[0]) for r in VARIABLES]
)
def test_a_variable_that_is_set_is_explained(environment: dict[str, str], severity: str, cause: str, evidence: str):
    findings = diagnose(variables(**environment))
    assert len(findings) == 1, [str(finding) for finding in findings]
    assert findings[0].severity == severity
    assert cause in findings[0].cause
    assert evidence in findings[0].evidence


@pytest.mark.parametrize(
    "environment",
    [
        {"NCCL_P2P_DISABLE": "0"},
        {"NCCL_P2P_LEVEL": "NVL"},
        {"NCCL_DEBUG": "WARN", "NCCL_VERSION": "2.30.7-1"},
        {"NCCL_SOCKET_IFNAME": "eth"},
        {"NCCL_SOCKET_IFNAME": "^docker,lo"},
        {"NCCL_SOCKET_IFNAME": "=eth0:5000"},
        {"GLOO_SOCKET_IFNAME": "lo"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,garbage_collection_threshold:0.8"},
        {"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]"},
        {"CUDA_LAUNCH_BLOCKING": "0", "TORCH_DISTRIBUTED_DEBUG": "INFO", "CUDA_DEVICE_MAX_CONNECTIONS": "8"},
        {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        {"MY_NCCL_THING": "1", "NCCL_SOMETHING_OF_A_PLUGIN": "1"},
    ],
    ids=str,
)
def test_variables_that_are_fine_say_nothing_worse_than_what_they_do(environment: dict[str, str]):
    assert all(finding.cause.split(" ")[1] == "is" for finding in diagnose(variables(**environment)))
    assert all(finding.severity == "note" for finding in diagnose(variables(**environment)))


def test_there_are_at_least_forty_distinct_findings():
    causes = {diagnose(make())[0].cause.replace("cuda:1", "") for _, make, *_ in PLANTED}
    causes |= {diagnose(variables(**environment))[0].cause for environment, *_ in VARIABLES}
    assert len(causes) >= 80


def test_damaged_copies_make_a_switched_off_p2p_right():
    damaged = copied(0, wrong_bytes=1)
    findings = diagnose(replace(damaged, environment={"NCCL_P2P_DISABLE": "1"}))
    assert [finding.severity for finding in findings] == ["error", "note"]
    assert "copies of a script's own don't" in findings[1].cause


def test_damaged_copies_name_what_is_around_them():
    damaged = replace(
        copied(0, wrong_bytes=1), surroundings=replace(SURROUNDINGS, iommu="translating", acs=("a", "b"), virtual=True)
    )
    assert "the IOMMU translates addresses, ACS redirects at 2 PCIe bridges" in diagnose(damaged)[0].evidence


def test_what_helped_a_hang_is_the_fix():
    finding = diagnose(found(hung_at=STAGE, helped="NCCL_P2P_DISABLE=1", all_reduces=()))[0]
    assert finding.fix.startswith("export NCCL_P2P_DISABLE=1")


@pytest.mark.parametrize(
    ("changed", "state"),
    [({"fabric": "in progress"}, "card 1: in progress"), ({"fabric_status": 999}, "card 1: failed with status 999")],
)
def test_cards_that_have_not_joined_their_switches(changed: dict[str, object], state: str):
    assert diagnose(sick(**changed)) == [], "CUDA works, and so does P2P"
    for broken, severity in (
        (replace(sick(**changed), torch=replace(TORCH, available=False)), "error"),
        (replace(sick(**changed), links=joined([range(2)], replace(HOST_BRIDGE, p2p=False))), "warning"),
    ):
        finding = next(each for each in nvlinks.probe(broken) if "NVSwitches" in each.cause)
        assert (finding.severity, finding.evidence) == (severity, state)


def test_a_link_that_was_told_asleep_is_no_slow_link():
    assert diagnose(host_copied(generation=1)) == []


def test_ranks_that_touched_another_card_than_theirs():
    each = [CardProcess(100 + rank, 20 * GIB, command="python train.py") for rank in range(2)]
    extra = replace(each[1], memory=GIB // 2)
    facts = made_facts([card(0, free=100, processes=[each[0], extra]), card(1, free=100, processes=[each[1]])])
    facts = replace(facts, own_pids=frozenset({100, 101}))
    finding = diagnose(facts)[0]
    assert finding.cause == "card 0 also holds memory of processes that work on other cards"
    assert "pid 101: 512 MiB" in finding.evidence
    assert "set_device" in finding.fix
    whole = made_facts([card(index, free=100, processes=[each[0]]) for index in range(2)])
    assert diagnose(replace(whole, own_pids=frozenset({100}))) == [], "one process that drives all cards"


def test_a_broken_driver_is_no_error_where_simulated_cards_were_asked_for():
    facts = without_cards("installed but not loaded", 2)
    facts = replace(facts, choice=made_facts([], "cpu:2").choice)
    assert [finding.severity for finding in diagnose(facts)] == ["warning"]


@pytest.mark.parametrize(
    "value", ["", " ", "²", "٣", "-1", "1e9", "nan", ",", "a:b:c", "[", "^", "=", "\x00", "9" * 30]
)
def test_no_value_of_a_variable_ends_a_probe(value: str):
    names = {name for environment, *_ in VARIABLES for name in environment}
    names |= {
        "OMP_NUM_THREADS",
        "CUDA_DEVICE_ORDER",
        "GLOO_SOCKET_IFNAME",
        "LOCAL_WORLD_SIZE",
        "WORLD_SIZE",
        "NCCL_DEBUG",
    }
    for name in sorted(names - {"CUDA_VISIBLE_DEVICES"}):
        for finding in diagnose(variables(**{name: value})):
            assert finding.evidence


def test_errors_of_programs_are_no_finding():
    assert diagnose(around(xids=(Xid(13, "0000:01:00"), Xid(31, "0000:01:00"), Xid(43, "0000:01:00")))) == []


def test_an_idle_link_that_sleeps_is_no_finding():
    assert HEALTH.pcie.generation == 1
    assert diagnose(well(measured=measured(1))) == []


def test_a_power_cap_that_is_reached_is_no_finding():
    assert diagnose(loaded(reasons=("power cap",), sm_clock=1500)) == []
    assert diagnose(loaded(reasons=("power brake",), sm_clock=1500)) != []


def test_a_name_that_does_not_resolve():
    finding = diagnose(around(name_resolves=False))[0]
    assert "own name has no address" in finding.cause
    assert diagnose(replace(around(name_resolves=False), environment={"GLOO_SOCKET_IFNAME": "lo"})) == []


def test_a_card_too_new_for_its_nccl():
    facts = well(torch=replace(TORCH, nccl="2.21.5", nccl_packaged="2.21.5", archs=("sm_100",)))
    infos = tuple(replace(info, capability=(10, 0)) for info in facts.visible.cards)
    finding = diagnose(replace(facts, visible=replace(facts.visible, cards=infos)))[0]
    assert (finding.severity, "need 2.25 or newer" in finding.evidence) == ("error", True)


def test_pairs_of_one_kind_that_differ():
    copies = tuple(
        Copy(a, b, 60.0 if "cuda:3" in (a, b) else 120.0, 9.0, 0, 1, True)
        for a in ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
        for b in ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
        if a != b
    )
    slow_link = replace(next(iter(well().links.pairs.values())), gb_per_s=110.0)
    facts = well(4, links=joined([range(4)], slow_link))
    findings = diagnose(replace(facts, measured=replace(facts.measured, copies=copies)))
    assert [finding.cause for finding in findings] == [
        "some pairs of cards are slower than others that are joined alike"
    ]


def test_unknown_health_and_surroundings_are_no_finding():
    from manycard.cards import CardHealth, Surroundings

    facts = well(health={0: CardHealth(), 1: CardHealth()}, surroundings=Surroundings())
    assert diagnose(replace(facts, measured=type(facts.measured)())) == []


def test_network_of_a_bridge_is_fine_on_one_machine():
    assert Network("docker0", True, "172.17.0.1", bridge=True).loopback is False
    assert diagnose(variables(NCCL_SOCKET_IFNAME="docker0")) == []
