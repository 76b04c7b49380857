"""Measuring: damaged copies are seen, what hangs or fails is named, and the worker measures whatever cards it gets."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace

import psutil
import pytest
import torch

from manycard.diagnosis import Measured
from manycard.diagnosis.measuring import Request, cuda_hangs_at, measure, request_for, run_request
from manycard.diagnosis.measuring.bits import compare_copies
from manycard.diagnosis.measuring.ranks import RanksStuckError, join_ranks
from manycard.diagnosis.measuring.stages import FIRST_STAGE, run_in_stages
from manycard.diagnosis.measuring.timing import time_all_reduce, time_host_copies, time_products
from manycard.engine.replicas.collective import Collective, SumsOnHost
from tests.unit.cards.machines import card, stranger
from tests.unit.diagnosis.made import made_facts, well
from tests.unit.launch.processes import running_children

CPU = torch.device("cpu")
SMALL = Request(
    ("cpu", "cpu"),
    copy_size=1 << 16,
    compared=(1, 4099),
    reduced=(4 << 10, 64 << 10),
    matrix_side=32,
    load_seconds=0.01,
)


class TestBits:
    def test_right_copies(self):
        assert compare_copies(CPU, CPU, (1, 4099)) == (0, 3 * 4100)

    def test_one_flipped_bit(self):
        def flip(target: torch.Tensor, source: torch.Tensor) -> None:
            target.copy_(source)
            target[7] ^= 0x10

        assert compare_copies(CPU, CPU, (4096,), flip)[0] == 3

    def test_nothing_arrives(self):
        wrong, compared = compare_copies(CPU, CPU, (64, 8 << 20), lambda target, source: None)
        assert wrong == compared == 3 * 64 + (8 << 20)

    def test_a_part_arrives(self):
        def half(target: torch.Tensor, source: torch.Tensor) -> None:
            target[: len(target) // 2].copy_(source[: len(source) // 2])

        assert compare_copies(CPU, CPU, (100,), half)[0] == 150


class Wrong(SumsOnHost):
    """Adds up wrongly on the last card."""

    def all_reduce(self, tensors: list[torch.Tensor]) -> None:
        super().all_reduce(tensors)
        tensors[-1][-1] += 1


@pytest.mark.parametrize(("collective", "right"), [(SumsOnHost(), True), (Wrong(), False)])
def test_sums_are_compared_with_the_truth(collective: Collective, right: bool):
    took = time_all_reduce(collective, [CPU] * 3, 4096)
    assert took.right is right
    assert took.seconds > 0


def test_the_link_is_looked_at_while_copies_run_and_clocks_while_products_do():
    looked: list[str] = []
    assert min(time_host_copies(CPU, 1 << 16, lambda: looked.append("link"))) > 0
    assert min(time_products([CPU, CPU], 16, 0.01, lambda: looked.append("clocks"))) > 0
    assert looked == ["link", "clocks"]


def test_the_worker_measures_every_pair_and_card():
    stages: list[str] = []
    run = run_request(SMALL, os.environ, stages.append)
    assert (run.hung_at, run.failed_at, run.failure) == ("", "", "")
    measured = Measured.from_records(run.records)
    assert len(measured.copies) == 2
    assert all(copy.wrong_bytes == 0 and copy.compared_bytes == 3 * 4100 for copy in measured.copies)
    assert [reduced.size for reduced in measured.all_reduces] == [4 << 10, 64 << 10]
    assert all(reduced.right and reduced.bus_gb_per_s > 0 for reduced in measured.all_reduces)
    assert len(measured.host_copies) == len(measured.loads) == 2
    assert stages[0] == FIRST_STAGE
    assert "starting NCCL on cpu, cpu" in stages
    assert stages[-1] == "joining 2 ranks over NCCL"
    assert measured.ranks[0].count == 2


class TestRanks:
    def test_a_network_interface_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
        with pytest.raises(RanksStuckError, match="rank 0 failed at: joining the group over gloo"):
            join_ranks(["cpu", "cpu"], 60)

    def test_ranks_that_are_not_done_in_time_are_named_with_what_they_do(self):
        with pytest.raises(RanksStuckError, match=r"rank 0 waits at: .*; rank 1 waits at: "):
            join_ranks(["cpu", "cpu"], 0.1)
        assert not [child for child in running_children() if "measuring.ranks" in " ".join(child.cmdline())]


class TestStages:
    BEGIN = "import json, os, sys, time; fd = int(sys.argv[1])\n"
    SAY = "def say(**record): os.write(fd, json.dumps(record).encode() + b'\\n')\n"

    def run(self, program: str, **settings: float):
        return run_in_stages([sys.executable, "-c", self.BEGIN + self.SAY + program], os.environ, **settings)

    def test_a_stage_that_hangs_is_named_and_ended_with_what_it_started(self):
        program = (
            "import subprocess; child = subprocess.Popen(['sleep', '60'])\n"
            "say(stage='copying', seconds=9); say(kind='copy', pid=child.pid)\n"
            "say(stage='starting NCCL', seconds=0.2); time.sleep(60)"
        )
        start = time.monotonic()
        run = self.run(program)
        assert (run.hung_at, run.failed_at) == ("starting NCCL", "")
        assert time.monotonic() - start < 15
        assert [record["kind"] for record in run.records] == ["copy"]
        assert not psutil.pid_exists(run.records[0]["pid"])

    def test_a_stage_that_raises_is_named_with_its_error(self):
        run = self.run("say(stage='adding', seconds=9)\nprint('noise')\nraise RuntimeError('NCCL: no P2P')")
        assert (run.hung_at, run.failed_at) == ("", "adding")
        assert run.failure == "RuntimeError: NCCL: no P2P (exit status 1)"

    def test_a_crash_is_a_failure_of_its_stage(self):
        run = self.run("say(stage='adding', seconds=9); os.kill(os.getpid(), 11)")
        assert (run.failed_at, run.failure) == ("adding", "ended by signal 11")

    def test_a_process_that_never_begins(self):
        assert self.run("time.sleep(60)", first_limit=0.3).hung_at == FIRST_STAGE

    def test_what_is_printed_disturbs_nothing(self):
        run = self.run("print('{\"stage\": 1}'); print('x', file=sys.stderr); say(kind='copy', n=1)")
        assert run.records == [{"kind": "copy", "n": 1}]


class TestMeasure:
    def test_without_gpus_nothing_is_measured_and_the_reason_said(self):
        assert measure(made_facts([])).left_out == "there is no GPU to measure"

    def test_a_cuda_that_answers_does_not_hang(self):
        assert cuda_hangs_at(os.environ) == ""

    def test_other_people_s_cards_are_left_alone(self):
        facts = made_facts([card(0), card(1, free=100, processes=[stranger()])])
        assert "cuda:1 is in use by others" in measure(facts).left_out

    def test_full_cards_are_left_alone(self):
        assert "only 1.0 GiB" in measure(made_facts([card(0, free=1)])).left_out

    def test_sizes_fit_into_the_memory(self):
        assert request_for(well(2)).reduced[-1] == 500 << 20
        little = request_for(made_facts([card(0, free=2), card(1)]))
        assert little.reduced[-1] == 100 << 20
        assert little.copy_size == 128 << 20
        assert little.nvml == ()
        assert request_for(well(2)).nvml == (0, 1)

    @pytest.mark.parametrize(("helps", "helped"), [("NCCL_SHM_DISABLE", "NCCL_SHM_DISABLE=1"), ("", "")])
    def test_what_hangs_is_tried_with_what_may_help(self, monkeypatch: pytest.MonkeyPatch, helps: str, helped: str):
        from manycard.diagnosis import measuring
        from manycard.diagnosis.measuring.stages import StagedRun

        def run(request: Request, environment: dict[str, str], on_stage: object = None) -> StagedRun:
            if helps and environment.get(helps) == "1":
                return StagedRun([{"kind": "all_reduce", "size": 1, "us": 1.0, "bus_gb_per_s": 1.0, "right": True}])
            return StagedRun(hung_at="starting NCCL on cuda:0, cuda:1")

        monkeypatch.setattr(measuring, "run_request", run)
        measured = measure(well(2))
        assert measured.hung_at == "starting NCCL on cuda:0, cuda:1"
        assert measured.helped == helped

    def test_the_request_travels_whole(self):
        assert Request.from_json(SMALL.to_json()) == SMALL
        assert Request.from_json(replace(SMALL, nvml=(3, 1)).to_json()).nvml == (3, 1)
