"""``manycard bench data``: what it prints and returns, as a user's shell sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torchvision", reason="images need the extra vision")
pytest.importorskip("sklearn", reason="the photographs come with scikit-learn")

from manycard.cli import main


def test_make_then_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "photographs")
    assert main(["bench", "data", "--make", "12", "--kilobytes", "50", folder]) == 0
    assert capsys.readouterr().out.startswith("12 images of ")
    words = [
        "bench",
        "data",
        folder,
        "--cards",
        "cpu:1",
        "--backends",
        "threads,card",
        "--workers",
        "1",
        "--rounds",
        "1",
    ]
    words += ["--size", "32", "--batch", "4"]
    assert main([*words, "--json"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["use"] == {"backend": "threads", "workers": 1}
    assert document["left_out"] == {"card": "a CUDA card"}
    assert "round 1 of 1: threads, 1 workers" in printed.err
    assert main([*words, "--needs", "1"]) == 0
    table = capsys.readouterr().out
    assert "of what is needed" in table
    assert "card is left out: it needs a CUDA card." in table
    assert "it will not wait for images." in table


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gone"], "no such folder"),
        ([".", "--workers", "two"], "--workers='two'"),
        ([".", "--make", "0"], "--make=0"),
        ([".", "--needs", "5", "--workload", "resnet50"], "--workload='resnet50'"),
        ([".", "--workload", "gpt2", "--cards", "cpu:1"], "does not train on images"),
        ([], "Missing argument"),
    ],
)
def test_wrong_usage(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "data", *words]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out == ""


def test_no_image_decoded_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.jpg").write_bytes(b"hello")
    words = ["bench", "data", str(tmp_path), "--cards", "cpu:1", "--backends", "threads", "--workers", "1"]
    assert main([*words, "--rounds", "1"]) == 1
    assert "No backend could decode" in capsys.readouterr().out
