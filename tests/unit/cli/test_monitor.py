"""``manycard monitor`` as people and programs call it, on a machine without GPUs too."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from manycard.cli import main
from manycard.diagnosis.live import LiveReader, Recorder, read_recording
from tests.unit.cards.fake_nvml import FakeCard, FakeNvml
from tests.unit.diagnosis.live.made_samples import samples

SLEEP = "import time; print('up', flush=True); time.sleep(60)"


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two cards and no run."""
    nvml = FakeNvml([FakeCard(), FakeCard(uuid="GPU-2")])
    monkeypatch.setattr("manycard.cli.monitor.LiveReader", lambda job: LiveReader(job, api=nvml, find_jobs=list))


@pytest.fixture
def asleep() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", SLEEP, "--cards", "cpu:2"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_one_look_as_json(two_cards: None, capsys: pytest.CaptureFixture[str]):
    assert main(["monitor", "--once", "--json", "--interval", "0.1"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == ""
    assert [card["name"] for card in document["cards"]] == ["card 0", "card 1"]
    assert document["cards"][0]["use"] == 37
    assert document["cards"][0]["pcie_in"] is None
    assert document["imbalance"] == []


def test_lines_where_there_is_no_terminal(two_cards: None, capsys: pytest.CaptureFixture[str]):
    assert main(["monitor", "--samples", "3", "--interval", "0.1"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 6
    assert "card 1 (NVIDIA H200): use 37 %" in out


def test_recorded_and_replayed_are_the_same(two_cards: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "run.jsonl"
    assert main(["monitor", "--samples", "3", "--interval", "0.1", "--record", str(file)]) == 0
    live = capsys.readouterr().out
    assert main(["monitor", "--replay", str(file)]) == 0
    assert capsys.readouterr().out == live
    assert len(list(read_recording(file))) == 3
    assert main(["monitor", "--replay", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 3
    assert main(["monitor", "--replay", str(file), "--once"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_what_is_unequal_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "run.jsonl"
    with Recorder(file) as recorder:
        for sample in samples(5, use=40):
            recorder.write(sample)
    assert main(["monitor", "--replay", str(file)]) == 0
    assert capsys.readouterr().out.count("unequal: card 1 is used 40 %") == 1


def test_a_process_by_its_number_on_simulated_cards(asleep: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]):
    assert main(["monitor", "--pid", str(asleep.pid), "--once", "--json", "--interval", "0.1"]) == 0
    document = json.loads(capsys.readouterr().out)
    job = document["jobs"][0]
    assert job["pid"] == asleep.pid
    assert job["memory"] > 1 << 20
    if not document["cards"]:
        assert job["simulated"] == 2


def test_it_ends_with_the_run_that_it_watches(asleep: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]):
    import threading

    timer = threading.Timer(0.4, asleep.kill)
    timer.start()
    assert main(["monitor", "--pid", str(asleep.pid), "--interval", "0.1"]) == 0
    timer.join()
    out, err = capsys.readouterr()
    assert f"run {asleep.pid} on 2 simulated cards" in out
    assert f"manycard: the run {asleep.pid} has ended" in err


def test_ctrl_c_is_the_way_to_end(two_cards: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("manycard.cli.monitor.time.sleep", interrupt)
    assert main(["monitor"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--interval", "0"], "--interval=0.0: it must be at least 0.1 s"),
        (["--interval", "nan"], "--interval=nan"),
        (["--samples", "0"], "--samples=0: it must be at least 1"),
        (["--samples", "3", "--json"], "--samples=3: --json looks once"),
        (["--pid", str(2**22 + 7)], "there is no such process"),
        (["no_such_script_anywhere.py"], "no process runs a script of that name"),
        (["a.py", "--pid", "1"], "JOB (a.py) names a run as well"),
        (["--replay", "/no/such/file"], "can't be read"),
        (["--replay", "x", "--pid", "1"], "it shows what was recorded"),
        (["--record", "/no/such/folder/x", "--once"], "can't be written"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["monitor", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err


def test_an_empty_recording_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a").write_text("")
    assert main(["monitor", "--replay", str(tmp_path / "a")]) == 1
    assert "holds no sample" in capsys.readouterr().err


def test_on_this_machine_as_it_is(capsys: pytest.CaptureFixture[str]):
    assert main(["monitor", "--once", "--interval", "0.1"]) == 0
    out = capsys.readouterr().out
    assert "card 0" in out or "run" in out
