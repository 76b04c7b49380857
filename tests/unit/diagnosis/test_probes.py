"""Each probe: a machine that is well gives nothing, and each fault gives its one finding with its figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manycard.cards import CardProcess, Link, parse_spec
from manycard.diagnosis import PROBES, SEVERITIES, Facts, Finding, diagnose, read_facts
from manycard.diagnosis.probes.versions import _runs_on
from tests.unit.cards.machines import GIB, NUMA, card, joined, sliced, stranger
from tests.unit.cards.machines import HOST as HOST_BRIDGE
from tests.unit.diagnosis.made import HOST, TORCH, made_facts


def only(facts: Facts) -> Finding:
    findings = diagnose(facts)
    assert len(findings) == 1, [str(finding) for finding in findings]
    return findings[0]


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_a_machine_that_is_well_has_no_findings(count: int):
    assert diagnose(made_facts([card(index) for index in range(count)])) == []


def test_no_gpu_is_a_note():
    finding = only(made_facts([]))
    assert finding.severity == "note"
    assert "no NVIDIA driver" in finding.evidence
    assert "cpu:N" in finding.fix


def test_a_lost_card():
    finding = only(made_facts([card(0)], lost=("card 1: GPU is lost",)))
    assert (finding.severity, finding.evidence) == ("error", "card 1: GPU is lost")


def test_other_people_on_a_card():
    finding = only(made_facts([card(0), card(1, free=111, processes=[stranger()])]))
    assert finding.severity == "warning"
    assert finding.cause == "cuda:1 is in use by others"
    assert "pid 4242 of someone" in finding.evidence
    assert "--cards auto" in finding.fix


def test_too_little_memory():
    finding = only(made_facts([card(0, free=1, processes=[CardProcess(7, 139 * GIB, graphics=True)])]))
    assert (finding.severity, finding.cause) == ("error", "cuda:0 has too little free memory to train")
    assert "1.0 GiB of 141.0 GiB" in finding.evidence
    assert "can't be seen" not in finding.evidence


def test_memory_that_nobody_in_sight_holds():
    assert "140.0 GiB are held by processes that can't be seen" in only(made_facts([card(0, free=1)])).evidence


def test_a_card_that_is_not_chosen_is_nobody_s_trouble():
    machine = [card(0), card(1, free=1, processes=[stranger()])]
    assert diagnose(made_facts(machine, "0,")) == []
    assert diagnose(made_facts(machine, "auto")) == []


class TestVersions:
    def test_torch_for_the_cpu_beside_gpus(self):
        torch = replace(TORCH, version="2.14.1+cpu", cuda=None, available=False, nccl=None, archs=())
        finding = only(made_facts([card(0)], torch=torch))
        assert finding.severity == "error"
        assert "built for the CPU only" in finding.cause
        assert "card 0: NVIDIA H200" in finding.evidence

    def test_torch_for_the_cpu_without_gpus_is_fine(self):
        torch = replace(TORCH, cuda=None, available=False, nccl=None, archs=())
        assert [finding.severity for finding in diagnose(made_facts([], torch=torch))] == ["note"]

    def test_a_driver_of_an_older_major_version(self):
        finding = only(made_facts([card(0)], driver_cuda=(12, 8), torch=replace(TORCH, available=False)))
        assert finding.severity == "error"
        assert "580.95.05 (up to CUDA 12.8)" in finding.evidence
        assert "CUDA 13.0" in finding.evidence
        assert "torch for CUDA 12" in finding.fix

    def test_a_driver_of_an_older_minor_version_is_a_note(self):
        finding = only(made_facts([card(0)], torch=replace(TORCH, cuda=(13, 2))))
        assert finding.severity == "note"

    def test_a_newer_driver_is_fine(self):
        assert diagnose(made_facts([card(0)], driver_cuda=(14, 1))) == []
        assert diagnose(made_facts([card(0)], driver_cuda=None)) == []

    def test_cuda_that_does_not_start(self):
        finding = only(made_facts([card(0)], torch=replace(TORCH, available=False)))
        assert finding.severity == "error"
        assert "is_available() is False" in finding.evidence

    def test_cards_hidden_on_purpose_are_no_broken_cuda(self):
        facts = made_facts([card(0)], torch=replace(TORCH, available=False), environment={"CUDA_VISIBLE_DEVICES": "-1"})
        finding = only(facts)
        assert (finding.severity, finding.cause) == ("note", "CUDA_VISIBLE_DEVICES hides every card")

    def test_no_nccl(self):
        torch = replace(TORCH, nccl=None)
        assert diagnose(made_facts([card(0)], torch=torch)) == []
        assert "no NCCL" in only(made_facts([card(0), card(1)], torch=torch)).cause

    def test_an_old_torch(self):
        assert "2.11 is the oldest" in only(made_facts([card(0)], torch=replace(TORCH, version="2.9.0"))).evidence

    def test_a_card_without_kernels(self):
        old = replace(card(1, "T4"), capability=(7, 5))
        findings = diagnose(made_facts([card(0), old], "1,"))
        assert [finding.cause for finding in findings] == ["torch holds no kernels for cuda:1 (NVIDIA T4)"]
        assert "7.5" in findings[0].evidence

    @pytest.mark.parametrize(
        ("archs", "capability", "runs"),
        [
            (["sm_80"], (8, 0), True),
            (["sm_80"], (8, 6), True),
            (["sm_86"], (8, 0), False),
            (["sm_80"], (9, 0), False),
            (["compute_80"], (9, 0), True),
            (["compute_90"], (8, 0), False),
            (["sm_90a"], (9, 0), True),
            (["sm_100a"], (10, 3), False),
            (["sm_100f"], (10, 3), True),
            (["sm_120"], (12, 0), True),
            (["sm_120"], (12, 1), True),
            (["sm_75", "sm_120"], (9, 0), False),
            (["gfx942"], (9, 0), False),
        ],
    )
    def test_what_runs_where(self, archs: list[str], capability: tuple[int, int], runs: bool):
        assert _runs_on(archs, capability) is runs


class TestVisibility:
    def test_an_entry_that_is_ignored(self):
        finding = only(made_facts([card(0), card(1)], environment={"CUDA_VISIBLE_DEVICES": "0,7,1"}))
        assert finding.severity == "warning"
        assert "'7'" in finding.evidence
        assert "0 to 1" in finding.fix

    def test_hidden_cards_are_a_note(self):
        environment = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        finding = only(made_facts([card(0), card(1, "T4")], environment=environment))
        assert finding.severity == "note"
        assert "card 1 (NVIDIA T4)" in finding.evidence


class TestLinks:
    def test_no_p2p(self):
        refused = Link("PHB", 144, "one PCIe host bridge", p2p=False, why_no_p2p="the cards don't support it")
        machine = [card(index) for index in range(3)]
        finding = only(made_facts(machine, links=joined([range(3)], refused)))
        assert finding.severity == "warning"
        assert "3 of 3 pairs, cuda:0-cuda:1, cuda:0-cuda:2, cuda:1-cuda:2" in finding.evidence
        assert "the cards don't support it (one PCIe host bridge)" in finding.evidence

    def test_unequal_links(self):
        machine = [card(index) for index in range(4)]
        finding = only(made_facts(machine, links=joined([(0, 1), (2, 3)], count=4)))
        assert finding.severity == "note"
        assert "18 NVLinks" in finding.evidence
        assert diagnose(made_facts(machine, "0,1", links=joined([(0, 1), (2, 3)], count=4))) == []
        assert diagnose(made_facts(machine, links=joined([], outside=NUMA))) == []
        assert diagnose(made_facts(machine, links=joined([range(4)], HOST_BRIDGE))) == []

    def test_unknown_links_are_no_finding(self):
        from manycard.cards import Links

        assert diagnose(made_facts([card(0), card(1)], links=Links({}))) == []


def test_unequal_cards():
    finding = only(made_facts([card(0), card(1, "T4"), card(2)]))
    assert finding.severity == "warning"
    assert finding.evidence == "2 x NVIDIA H200 (141 GiB), 1 x NVIDIA T4 (15 GiB)"


class TestMig:
    def test_slices(self):
        finding = only(made_facts([sliced(0, 2)]))
        assert finding.severity == "note"
        assert "NCCL refuses two of one card" in finding.evidence

    def test_mig_mode_without_slices(self):
        finding = only(made_facts([sliced(0, 0), card(1, "A100")]))
        assert finding.severity == "warning"
        assert "without a slice" in finding.cause


class TestHost:
    def test_threads_that_outnumber_the_cores(self):
        facts = made_facts([card(index) for index in range(8)], environment={"OMP_NUM_THREADS": "16"})
        finding = only(facts)
        assert finding.severity == "warning"
        assert "128 threads on 64 cores" in finding.evidence
        assert finding.fix.startswith("set OMP_NUM_THREADS=8,")

    @pytest.mark.parametrize("value", ["8", "1", "", "4,2"])
    def test_threads_that_fit(self, value: str):
        machine = [card(index) for index in range(8)]
        assert diagnose(made_facts(machine, environment={"OMP_NUM_THREADS": value})) == []

    def test_few_cores(self):
        finding = only(made_facts([card(0), card(1)], host=replace(HOST, cores=2), torch=replace(TORCH, threads=2)))
        assert finding.evidence == "2 cores (of the machine's 64) for 2 cards"

    def test_small_shared_memory(self):
        small = replace(HOST, shm_total=64 * 1024**2, shm_free=60 * 1024**2)
        finding = only(made_facts([card(0)], host=small))
        assert finding.severity == "warning"
        assert finding.evidence.startswith("60 MiB of 64 MiB are free: 8 loader workers")
        assert "4 MiB for each batch" in finding.evidence
        assert "--shm-size" in finding.fix
        assert diagnose(made_facts([card(0)], host=replace(HOST, shm_total=None, shm_free=None))) == []


def test_the_gravest_comes_first():
    machine = [card(0, free=1), card(1, "T4")]
    findings = diagnose(made_facts(machine, environment={"CUDA_VISIBLE_DEVICES": "0,1,9"}))
    order = [SEVERITIES.index(finding.severity) for finding in findings]
    assert order == sorted(order)
    assert len(set(order)) > 1


def test_every_probe_is_in_the_list():
    import pkgutil

    import manycard.diagnosis.probes as package

    files = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert {probe.__module__.rsplit(".", 1)[1] for probe in PROBES} == files


def test_this_machine_can_be_diagnosed():
    facts = read_facts("cpu:2")
    assert [item.name for item in facts.choice.cards] == ["cpu:0", "cpu:1"]
    for finding in diagnose(facts):
        assert finding.evidence
        assert str(finding).startswith(finding.severity)


@pytest.mark.parametrize("field", ["cause", "fix"])
def test_a_finding_without_a_cause_or_a_fix_is_a_fault_of_ours(field: str):
    whole = {"cause": "x", "evidence": "y", "fix": "z", "severity": "note"}
    with pytest.raises(AssertionError):
        Finding(**{**whole, field: ""})
    with pytest.raises(AssertionError):
        Finding(**{**whole, "severity": "fatal"})


def test_hidden_cards_know_slices_of_theirs():
    facts = made_facts([sliced(0, 2), card(1, "A100")])
    assert parse_spec("all").kind == "all"
    assert [info.index for info in facts.hidden] == [1]
