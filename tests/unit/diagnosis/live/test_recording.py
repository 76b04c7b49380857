"""What is written can be read again, and what can't is said with its line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from manycard.diagnosis.live import Recorder, Sample, read_recording, summarise
from manycard.errors import DataError, SettingError
from tests.unit.diagnosis.live.made_samples import GIB, ranks, samples


def test_written_and_read_are_equal(tmp_path: Path):
    whole = [
        *samples(2, reasons=("power cap",)),
        Sample(1.0, note="none"),
        replace(samples(1)[0], jobs=(ranks(1.0, 2.0),)),
    ]
    with Recorder(tmp_path / "a.jsonl") as recorder:
        for sample in whole:
            recorder.write(sample)
        assert (tmp_path / "a.jsonl").read_text().count("\n") == 4, "each is there at once"
    assert list(read_recording(tmp_path / "a.jsonl")) == whole


def test_what_a_newer_version_wrote_more_is_left_out(tmp_path: Path):
    document = json.loads(samples(1)[0].to_json())
    document["news"] = document["cards"][0]["news"] = 1
    (tmp_path / "a.jsonl").write_text(json.dumps(document) + "\n")
    assert list(read_recording(tmp_path / "a.jsonl")) == samples(1)


def test_a_recording_that_was_killed_ends_before_its_last_line(tmp_path: Path):
    text = samples(1)[0].to_json()
    (tmp_path / "a.jsonl").write_text(text + "\n" + text[:50])
    assert len(list(read_recording(tmp_path / "a.jsonl"))) == 1


@pytest.mark.parametrize(
    "line", ["no json", "[]", '{"a": 1}', '{"time": 1, "cards": [7]}', '{"time": 1, "jobs": [{}]}']
)
def test_another_file_is_refused_with_the_line(tmp_path: Path, line: str):
    (tmp_path / "a.jsonl").write_text(f"{line}\n{samples(1)[0].to_json()}\n")
    with pytest.raises(DataError, match="line 1: "):
        list(read_recording(tmp_path / "a.jsonl"))


def test_files_that_cannot_be_used(tmp_path: Path):
    with pytest.raises(SettingError, match=r"--replay=.*can't be read"):
        list(read_recording(tmp_path / "none"))
    with pytest.raises(SettingError, match=r"--record=.*can't be written"):
        Recorder(tmp_path / "none" / "a.jsonl")


def test_a_recording_in_figures():
    whole = [*samples(2, use=40), *samples(2, use=60, memory_used=100 * GIB, power=None)]
    summary = summarise(whole)
    assert summary["samples"] == 4
    second = summary["cards"][1]
    assert (second["name"], second["use_mean"], second["use_max"]) == ("card 1", 50, 60)
    assert second["memory_used_max"] == 100 * GIB
    assert second["power_mean"] == 610.0
    assert any("card 1 is used 50 %" in line for line in summary["imbalance"])
    assert summarise([])["cards"] == []
