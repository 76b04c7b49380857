"""Looking at cards by a driver that answers, one that doesn't, and at processes that come and go."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pynvml
import pytest

from manycard.diagnosis.live import Job, LiveReader, find_job, job_of, manycard_jobs
from manycard.diagnosis.live.jobs import _command, _is_manycard, _runs
from manycard.errors import SettingError
from tests.unit.cards.fake_nvml import GIB, FakeCard, FakeNvml, on_card

SPIN = "import time, sys\nprint('up', flush=True)\nend = time.time() + 60\nwhile time.time() < end: sum(range(1000))"


class Live(FakeNvml):
    """The fake driver with traffic: each question finds another MiB on the NVLinks."""

    count = 0

    def __getattr__(self, name: str):
        if name == "nvmlDeviceGetPcieThroughput":
            return lambda handle, counter: 2048 if counter == pynvml.NVML_PCIE_UTIL_RX_BYTES else 1024
        if name == "nvmlDeviceGetClockInfo":
            return lambda handle, clock: 1755
        if name == "nvmlDeviceGetFieldValues":
            return self._fields
        return super().__getattr__(name)

    def _fields(self, handle: object, asked: list[tuple[int, int]]) -> object:
        values = (pynvml.c_nvmlFieldValue_t * len(asked))()
        self.count += 1024
        values[0].value.ullVal = self.count
        return values


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[str]]:
    """A process that computes."""
    process = subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_every_figure_of_a_card():
    nvml = Live([FakeCard(processes=[on_card(os.getpid(), GIB)])])
    with LiveReader(api=nvml, find_jobs=list) as reader:
        assert reader.read().cards[0].nvlink_in is None
        sample = reader.read()
    assert nvml.started == 0
    card = sample.cards[0]
    assert (card.name, card.model, card.use, card.temperature, card.sm_clock) == ("card 0", "NVIDIA H200", 37, 41, 1755)
    assert (card.memory_used, card.memory_total) == (GIB, 141 * GIB)
    assert (card.power, card.power_limit) == (117.25, 700.0)
    assert (card.pcie_in, card.pcie_out) == (2048 * 1024, 1024 * 1024)
    assert (card.nvlink_in or 0) > 0
    assert card.processes is not None
    assert card.processes[0].pid == os.getpid()


def test_no_driver_and_a_lost_card():
    with LiveReader(api=FakeNvml(init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND), find_jobs=list) as reader:
        sample = reader.read()
    assert sample.cards == ()
    assert "no NVIDIA driver" in sample.note
    with LiveReader(api=FakeNvml([FakeCard(broken=True), FakeCard()]), find_jobs=list) as reader:
        assert [card.name for card in reader.read().cards] == ["card 1"]


def test_a_run_on_one_card_shows_that_card_and_what_it_takes(busy: subprocess.Popen[str]):
    nvml = Live([FakeCard(), FakeCard(uuid="GPU-2", processes=[on_card(busy.pid, GIB)])])
    with LiveReader(job_of(busy.pid), api=nvml) as reader:
        reader.read()
        busy_for = psutil.Process(busy.pid).cpu_times().user
        while psutil.Process(busy.pid).cpu_times().user <= busy_for:
            pass
        sample = reader.read()
    assert [card.name for card in sample.cards] == ["card 1"]
    job = sample.jobs[0]
    assert (job.pid, job.cards, job.simulated) == (busy.pid, ("card 1",), None)
    assert (job.cpu or 0) > 0
    assert (job.memory or 0) > 1 << 20


def test_where_the_driver_numbers_processes_of_outside_all_cards_are_shown(busy: subprocess.Popen[str]):
    nvml = Live([FakeCard(processes=[on_card(2**22 + 7, GIB)]), FakeCard(uuid="GPU-2")])
    with LiveReader(job_of(busy.pid), api=nvml) as reader:
        assert len(reader.read().cards) == 2


def test_cards_of_others_are_not_the_run_s(busy: subprocess.Popen[str]):
    nvml = Live([FakeCard(processes=[on_card(os.getpid(), GIB)])])
    with LiveReader(job_of(busy.pid), api=nvml) as reader:
        assert reader.read().cards == ()


def test_a_run_that_ends_is_left_out():
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    job = job_of(process.pid)
    process.wait()
    assert not job.alive()
    assert job.family() == []
    with LiveReader(job, api=FakeNvml([])) as reader:
        assert reader.read().jobs == ()


class TestJobs:
    @pytest.mark.parametrize(
        ("words", "shown", "is_run"),
        [
            (["/usr/bin/python3", "/opt/bin/manycard", "run", "train.py"], "manycard run train.py", True),
            (["python", "-m", "manycard.cli", "bench"], "manycard bench", True),
            (["python", "-c", "from manycard.cli import main", "run", "a.py"], "manycard run a.py", True),
            (["python", "/opt/bin/manycard", "monitor"], "manycard monitor", False),
            (["/usr/bin/python3", "train.py"], "python3 train.py", False),
            (["vim", "manycard", "run"], "vim manycard run", False),
            ([], "", False),
        ],
    )
    def test_which_processes_are_runs_of_manycard(self, words: list[str], shown: str, is_run: bool):
        assert _command(words) == shown
        assert _is_manycard(words) is is_run

    @pytest.mark.parametrize(
        ("words", "runs"),
        [
            (["python3.11", "/home/a/train.py", "--lr", "1"], True),
            (["python", "-m", "pkg", "train.py"], True),
            (["manycard", "run", "train.py"], True),
            (["vim", "train.py"], False),
            (["python", "manycard", "monitor", "train.py"], False),
            (["python", "retrain.py"], False),
        ],
    )
    def test_which_processes_run_a_script(self, words: list[str], runs: bool):
        assert _runs(words, "train.py") is runs

    def test_a_script_is_found_by_its_name(self, tmp_path):
        script = tmp_path / "watched_script_of_a_test.py"
        script.write_text(SPIN)
        process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        try:
            assert find_job(script.name).pid == process.pid
            assert find_job(str(script)).pid == process.pid
            second = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.DEVNULL)
            try:
                psutil.wait_procs([psutil.Process(second.pid)], timeout=0.3)
                with pytest.raises(SettingError, match=r"2 runs have that name .*Fix: give --pid"):
                    find_job(script.name)
            finally:
                second.kill()
                second.wait()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    def test_nothing_to_find(self):
        with pytest.raises(SettingError, match="no process runs a script of that name"):
            find_job("no_such_script_anywhere.py")
        with pytest.raises(SettingError, match="there is no such process"):
            job_of(2**22 + 7)

    def test_simulated_cards_by_command_line_and_environment(self):
        program = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
        told = [
            ([*program, "--cards", "cpu:3"], {}, 3),
            ([*program, "--cards=cpu:2"], {}, 2),
            (program, {"MANYCARD_CARDS": "cpu:4"}, 4),
            ([*program, "--cards", "0,1"], {"MANYCARD_CARDS": "cpu:4"}, None),
            (program, {}, None),
        ]
        for words, extra, expected in told:
            environment = {**os.environ, "MANYCARD_CARDS": "all", **extra}
            process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            try:
                process.stdout.readline()
                assert Job(psutil.Process(process.pid), "").simulated() == expected
            finally:
                process.kill()
                process.wait()
                process.stdout.close()

    def test_this_test_is_no_run_of_manycard(self):
        assert os.getpid() not in [job.pid for job in manycard_jobs()]
