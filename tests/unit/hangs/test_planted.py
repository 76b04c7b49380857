"""Planted hangs: who waits where is said, and the run is ended, or goes on, as was asked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What was said of each case of `one_process`, by its name."""
    return cases_of("one_process.py")


@pytest.fixture(scope="module")
def said_of_pipelines() -> dict[str, str]:
    """What was said of each case of `in_pipeline`, by its name."""
    return cases_of("in_pipeline.py")


def cases_of(script: str) -> dict[str, str]:
    words = [sys.executable, str(HERE / script), "raise"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^== (\w+)\n(.*?)(?=^== |\Z)", done.stderr, re.DOTALL | re.MULTILINE))


def test_a_card_that_stands_in_loss_fn_is_named_with_its_line(said: dict[str, str]) -> None:
    text = said["a_card_in_loss_fn"]
    assert "the script: waits for its cards" in text
    assert "cpu:0: has ended its part" in text
    assert "cpu:2: waits for its turn" in text
    assert re.search(r"HangError: cpu:1 has not ended its part: it is at .*one_process.py:\d+ in loss_fn", text)
    assert said["the_step_after_it"].strip() == "ended well"


def test_a_loader_that_yields_nothing_is_named(said: dict[str, str]) -> None:
    assert "HangError: the loader yields no batch" in said["a_loader_of_ours"]
    assert "in __getitem__: time.sleep(60)" in said["a_loader_of_ours"]
    assert "cause: the loader yields no batch" in said["a_data_loader"]


def test_it_can_be_only_said(said: dict[str, str]) -> None:
    assert "cpu:2 has not ended its part" in said["only_said"]
    assert "the run goes on" in said["only_said"]
    assert "ended well" in said["only_said"]


@pytest.mark.parametrize("case", ["long_code_of_the_script", "long_evaluation", "an_evaluation_of_many_batches"])
def test_nothing_is_said_of_what_only_takes_long(said: dict[str, str], case: str) -> None:
    assert said[case].strip() == "ended well"


def test_a_debugger_is_no_hang(said: dict[str, str]) -> None:
    assert "the run hangs" not in said["a_debugger_in_loss_fn"]
    assert "ended well" in said["a_debugger_in_loss_fn"]


@pytest.mark.parametrize(("case", "function"), [("in_forward", "forward"), ("in_backward", "backward")])
def test_a_stage_of_a_pipeline_that_stands_is_named_with_its_line(
    said_of_pipelines: dict[str, str], case: str, function: str
) -> None:
    text = said_of_pipelines[case]
    assert re.search(rf"cpu:1 has not ended its part: it is at .*in_pipeline.py:\d+ in {function}: time.sleep", text)
    cards = [line.split()[1:3] for line in text.splitlines() if line.startswith("manycard:     cpu:")]
    assert [card for card, _ in cards] == ["cpu:0:", "cpu:1:", "cpu:2:"]
    assert cards[0][1] == "waits"
    assert said_of_pipelines["the_step_after_it"].strip() == "ended well"


def test_a_call_of_a_pipeline_is_watched_and_a_long_checkpoint_is_no_hang(said_of_pipelines: dict[str, str]) -> None:
    assert "HangError: cpu:1 has not ended its part" in said_of_pipelines["a_long_call"]
    lines = said_of_pipelines["a_long_checkpoint"].splitlines()
    assert lines == ["saved in 'checkpoint'", "loaded in 'checkpoint'", "ended well"]


def test_the_process_is_ended() -> None:
    begin = time.monotonic()
    words = [sys.executable, str(HERE / "one_process.py"), "end"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "cpu:1 has not ended its part" in done.stderr
    assert done.stderr.rstrip().endswith("manycard: ended the run")
    assert "== the_step_after_it" not in done.stderr
    assert time.monotonic() - begin < 50


def in_ranks(kind: str, seconds: str = "1") -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "manycard.cli", "run", "--strategy", "ddp", "--cards", "cpu:2"]
    words += ["--hang-timeout", seconds, str(HERE / "ranks_hang.py"), kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, capture_output=True, text=True, timeout=80, check=False, env=environment)


def test_a_rank_that_stands_in_its_own_code_is_named() -> None:
    done = in_ranks("stuck")
    assert done.returncode == 1
    assert "after 5 steps" in done.stderr
    assert re.search(r"rank 0: waits for other ranks, in all_reduce number \d+ of 10 float numbers", done.stderr)
    assert re.search(r"cause: rank 1 never came to the collective that rank 0 waits in: .*in write_log", done.stderr)
    assert "rank 1 is done" not in done.stdout


def test_a_collective_that_one_rank_leaves_out_is_named() -> None:
    done = in_ranks("skip")
    assert done.returncode == 1
    assert "cause: ranks wait in different collectives" in done.stderr
    assert re.search(r"rank 0 in all_reduce number \d+ of 2 float numbers", done.stderr)
    assert re.search(r"rank 1 in all_reduce number \d+ of 7 float numbers", done.stderr)
    assert done.stderr.count("dist.all_reduce(torch.ones(") >= 2


def test_a_rank_that_was_stopped_is_no_hang() -> None:
    done = in_ranks("stopped")
    assert done.returncode == 0, done.stderr
    assert "the run hangs" not in done.stderr
    assert "rank 0 is done" in done.stdout
