"""Unmodified scripts on real cards: the log of one card, or refused in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.scripts.corpus import CORPUS, Entry
from tests.scripts.logs import same_log
from tests.scripts.runs import SOURCE, Job, Runs

ROOT = Path(__file__).resolve().parents[2]
ON_GPUS = [entry for entry in CORPUS if "cuda" in entry.path.read_text() and entry.expect != "differs"]
COUNTS = [count for count in (1, 2, 4, 8) if count <= torch.cuda.device_count()] or [1]
WORKERS = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")])),
    "NVIDIA_TF32_OVERRIDE": "0",  # the comparisons are of fp32
}


def _plain(entry: Entry) -> Job:
    return Job(entry.path, on_gpus=True)


def _spread(entry: Entry, cards: int) -> Job:
    return Job(entry.path, cards, entry.expect == "same_with_sync_batchnorm", on_gpus=True)


@pytest.fixture(scope="module")
def on_gpus(request: pytest.FixtureRequest) -> Iterator[Runs]:
    """Runs all that the tests of this module ask for, several at once."""
    made = Runs(WORKERS, ENVIRONMENT)
    try:
        for item in request.session.items:
            values = getattr(getattr(item, "callspec", None), "params", {})
            if item.path == request.path and "entry" in values:
                made.expect(_plain(values["entry"]))
                made.expect(_spread(values["entry"], values["cards"]))
        yield made
    finally:
        made.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("entry", ON_GPUS, ids=lambda entry: entry.name)
@pytest.mark.parametrize("cards", COUNTS)
def test_a_script_gives_the_log_of_one_card(on_gpus: Runs, entry: Entry, cards: int) -> None:
    plain, spread = on_gpus.result(_plain(entry)), on_gpus.result(_spread(entry, cards))
    assert (plain["status"], spread["status"]) == (0, 0), plain["stderr"] + spread["stderr"]
    assert same_log(plain["stdout"], spread["stdout"], tolerance=1e-3) is None, spread["stderr"]
    calls = sum(report["spread"] for report in spread["reports"])
    assert (calls > 0) == (cards > 1 and entry.expect != "one_card"), spread["stderr"]


@pytest.mark.timeout(300)
def test_the_document_says_what_was_spread() -> None:
    script = str(ROOT / "benchmarks" / "scripts" / "train.py")
    count = torch.cuda.device_count()
    words = ["--model", "mlp", "--batch", "256", "--steps", "5", "--warm-up", "5"]
    done = subprocess.run(
        [sys.executable, "-m", "manycard.cli", "run", "--cards", str(count), "--json", script, *words],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout)["spread"]
    assert report["spread"] == (10 if count > 1 else 0)
