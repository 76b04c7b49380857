"""The doctor and the monitor on real cards: what can be read is read, copies arrive, a healthy card has no error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import manycard
from manycard.cards import inventory, read_health, visible_now
from manycard.cards.nccl_settings import NcclMachine, load_settings, settings_file
from manycard.diagnosis import Facts, diagnose, read_facts
from manycard.diagnosis.measured import Measured
from manycard.diagnosis.measuring import Request, measure, run_request
from manycard.diagnosis.measuring.bits import compare_copies
from manycard.diagnosis.tuning import sweep, trial_runner

COUNTS = [count for count in (1, 2, 4, 8) if count <= max(torch.cuda.device_count(), 1)]
MIB = 1 << 20


def spec(count: int) -> str:
    return ",".join(map(str, range(count))) + ","


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run manycard in a process of its own."""
    source = str(Path(manycard.__file__).parents[1])
    whole = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]), **environment}
    return subprocess.run(
        [sys.executable, "-m", "manycard.cli", *words],
        env=whole,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.fixture(scope="module")
def measured() -> dict[int, Facts]:
    """Facts with measurements, by number of cards; made once."""
    return {}


def facts_of(count: int, measured: dict[int, Facts]) -> Facts:
    from dataclasses import replace

    if count not in measured:
        facts = read_facts(spec(count))
        measured[count] = replace(facts, measured=measure(facts))
    if measured[count].measured.left_out:
        pytest.skip(measured[count].measured.left_out)
    return measured[count]


def test_nvml_tells_of_every_card():
    health = read_health()
    assert set(health) == {info.index for info in inventory()}
    for card in health.values():
        assert card.reasons is not None
        assert card.pcie.generation_max
        assert card.pcie.width_max
        assert (card.power_default or 0) > 10
        assert card.compute_mode
        assert card.sm_clock_max


@pytest.mark.parametrize("count", COUNTS)
def test_a_healthy_machine_has_no_error(count: int, measured: dict[int, Facts]):
    errors = [str(finding) for finding in diagnose(facts_of(count, measured)) if finding.severity == "error"]
    assert errors == []


@pytest.mark.parametrize("count", COUNTS)
def test_every_pair_is_compared_and_timed(count: int, measured: dict[int, Facts]):
    found = facts_of(count, measured).measured
    assert (found.hung_at, found.failed_at, found.failure) == ("", "", "")
    assert len(found.copies) == count * (count - 1)
    for copy in found.copies:
        assert copy.wrong_bytes == 0, copy
        assert copy.compared_bytes > 64 * MIB
        assert copy.gb_per_s > 1
        assert 0 < copy.latency_us < 5000
        assert copy.peer == torch.cuda.can_device_access_peer(
            int(copy.source.split(":")[1]), int(copy.target.split(":")[1])
        )


@pytest.mark.parametrize("count", COUNTS)
def test_the_host_reaches_every_card_and_its_link_is_awake(count: int, measured: dict[int, Facts]):
    found = facts_of(count, measured)
    assert [copy.card for copy in found.measured.host_copies] == [f"cuda:{index}" for index in range(count)]
    for copy, (_, health) in zip(found.measured.host_copies, found.chosen_health, strict=True):
        assert copy.to_card > 1
        assert copy.generation is None or copy.generation <= (health.pcie.generation_max or 99)


@pytest.mark.parametrize("count", COUNTS)
def test_cards_compute_under_load_and_all_reduces_are_right(count: int, measured: dict[int, Facts]):
    found = facts_of(count, measured).measured
    assert len(found.loads) == count
    assert all((load.teraflops or 0) > 0.5 and load.power for load in found.loads)
    if count == 1:
        assert found.all_reduces == ()
        return
    assert all(reduced.right for reduced in found.all_reduces)
    assert [ranks.count for ranks in found.ranks] == [count]
    assert found.all_reduces[0].us < found.all_reduces[-1].us


def test_damage_between_real_cards_is_seen():
    one, other = torch.device("cuda:0"), torch.device("cuda", min(1, torch.cuda.device_count() - 1))

    def damage(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)
        target[len(target) // 2] ^= 1

    assert compare_copies(one, other, (4099,)) == (0, 3 * 4099)
    assert compare_copies(one, other, (4099,), damage)[0] == 3


def test_measuring_leaves_nothing_on_the_cards(measured: dict[int, Facts]):
    facts_of(COUNTS[-1], measured)
    commands = [process.command or "" for info in inventory() for process in info.processes or ()]
    assert not any("measuring.worker" in words for words in commands)


@pytest.mark.parametrize("count", COUNTS)
def test_the_command_prints_its_document(count: int):
    done = command("doctor", "--json", "--cards", spec(count))
    assert done.returncode in (0, 1), done.stderr
    document = json.loads(done.stdout)
    assert set(document) == {"machine", "cards", "links", "findings"}
    chosen = [row for row in document["cards"] if row["chosen"]]
    assert [row["name"] for row in chosen] == [f"cuda:{index}" for index in range(count)]
    assert all(row["health"]["pcie"]["width_max"] for row in chosen)
    assert not any(finding["severity"] == "error" for finding in document["findings"]), document["findings"]


def test_a_planted_variable_and_a_wrong_interface_are_found():
    done = command(
        "doctor",
        "--quick",
        "--json",
        NCCL_SOCKET_IFNAME="no_such_interface",
        CUDA_LAUNCH_BLOCKING="1",
        PYTORCH_ALLOC_CONF="expandable_segment:True",
    )
    assert done.returncode == 1
    causes = " ".join(finding["cause"] for finding in json.loads(done.stdout)["findings"])
    for words in ("NCCL_SOCKET_IFNAME names no network", "every kernel is waited for", "can't read PYTORCH_ALLOC_CONF"):
        assert words in causes


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA cards")
def test_p2p_that_is_switched_off_though_it_works_is_found():
    done = command("doctor", "--quick", "--json", "--cards", "0,1", NCCL_P2P_DISABLE="1")
    document = json.loads(done.stdout)
    works = document["links"][0]["p2p"]
    found = [finding for finding in document["findings"] if "NCCL_P2P_DISABLE" in finding["evidence"]]
    assert len(found) == 1
    assert found[0]["severity"] == ("warning" if works else "note")


def test_selected_cards_are_those_that_cuda_then_shows():
    done = command("doctor", "--select", "--cards", "0,")
    assert done.returncode == 0, done.stderr
    name, _, value = done.stdout.strip().partition("=")
    assert name == "CUDA_VISIBLE_DEVICES"
    shown = subprocess.run(
        [
            sys.executable,
            "-c",
            "import torch; print(torch.cuda.get_device_properties(0).uuid, torch.cuda.device_count())",
        ],
        env={**os.environ, name: value},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    ).stdout.split()
    assert shown == [str(torch.cuda.get_device_properties(0).uuid), "1"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA cards")
class TestNccl:
    def test_variables_reach_nccl_in_a_fresh_process(self):
        request = Request(("cuda:0", "cuda:1"), stages=("nccl",), reduced=(25 * MIB,))
        fast, slow = (
            Measured.from_records(run_request(request, {**os.environ, **extra}).records).all_reduces[0]
            for extra in ({}, {"NCCL_MAX_NCHANNELS": "1", "NCCL_MIN_NCHANNELS": "1"})
        )
        assert fast.right
        assert slow.right
        assert slow.us > fast.us

    def test_a_sweep_finds_that_one_channel_is_no_gain_and_the_default_runs_between(self):
        facts = read_facts("0,1")
        ran: list[dict[str, str]] = []
        found = sweep(
            trial_runner(facts, (25 * MIB,)),
            [{"NCCL_MAX_NCHANNELS": "1"}],
            lambda settings, done, total: ran.append(dict(settings)),
            rounds=1,
        )
        assert found.best is None
        assert (found.trials[0].gain or 1) < 1
        assert ran[0] == ran[-1] == {}

    def test_saved_settings_reach_a_run(self, tmp_path: Path):
        from manycard.cards import choose_cards
        from manycard.cards.nccl_settings import NcclSettings, save_settings

        machine = NcclMachine.of(choose_cards("0,1").cards)
        assert machine is not None
        assert machine.driver
        environment = {"XDG_CONFIG_HOME": str(tmp_path)}
        save_settings(machine, NcclSettings({"NCCL_MAX_NCHANNELS": "16"}, 1.1), settings_file(machine, environment))
        script = tmp_path / "script.py"
        script.write_text(
            "import os, manycard as mc\np = mc.Parallel(cards='0,1')\n"
            "print(os.environ.get('NCCL_MAX_NCHANNELS'))\np.close()\n"
        )
        done = command("run", str(script), **environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["16"]
        assert "NCCL settings saved for this machine: NCCL_MAX_NCHANNELS=16" in done.stderr
        done = command("run", "--nccl", "default", str(script), **environment)
        assert done.stdout.split() == ["None"]
        assert load_settings(machine, settings_file(machine, environment)) is not None


@pytest.fixture
def at_work() -> Iterator[subprocess.Popen[str]]:
    """A process that multiplies matrices on the first card."""
    program = (
        "import time, torch; x = torch.randn(4096, 4096, device='cuda:0'); print('up', flush=True)\n"
        "end = time.time() + 60\n"
        "while time.time() < end: (x @ x).sum().item()"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "up"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_monitor_sees_the_cards():
    done = command("monitor", "--once", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert len(document["cards"]) == len(inventory())
    for card in document["cards"]:
        assert card["memory_total"] > 1 << 30
        assert card["use"] is None or 0 <= card["use"] <= 100
        assert card["power"] is None or card["power"] > 1


def test_the_monitor_sees_a_process_at_work(at_work: subprocess.Popen[str]):
    time.sleep(2)
    done = command("monitor", "--pid", str(at_work.pid), "--once", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    used = max(card["use"] or 0 for card in document["cards"])
    assert used > 50
    if document["jobs"][0]["cards"]:
        place = visible_now(inventory()).cards[0].index
        assert document["jobs"][0]["cards"] == [f"card {place}"]


def test_a_recording_of_real_cards_can_be_replayed(tmp_path: Path):
    file = tmp_path / "run.jsonl"
    assert command("monitor", "--samples", "3", "--interval", "0.3", "--record", str(file)).returncode == 0
    done = command("monitor", "--replay", str(file), "--json")
    assert json.loads(done.stdout)["samples"] == 3
