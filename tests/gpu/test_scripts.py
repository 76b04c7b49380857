"""Unmodified scripts on real cards: the log of one card, or refused in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.scripts.corpus import CORPUS, Entry
from tests.scripts.logs import same_log

ROOT = Path(__file__).resolve().parents[2]
ON_GPUS = [entry for entry in CORPUS if "cuda" in entry.path.read_text() and entry.expect != "differs"]
COUNTS = [count for count in (1, 2, 4, 8) if count <= torch.cuda.device_count()] or [1]


def run(*words: str, cards: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command with TF32 off; on one card unless `cards` says how many."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NVIDIA_TF32_OVERRIDE": "0"}
    if cards is None:
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("entry", ON_GPUS, ids=lambda entry: entry.name)
@pytest.mark.parametrize("cards", COUNTS)
def test_a_script_gives_the_log_of_one_card(entry: Entry, cards: int) -> None:
    plain = run(str(entry.path))
    sync = ["--sync-batchnorm"] if entry.expect == "same_with_sync_batchnorm" else []
    words = ["-m", "manycard.cli", "run", "--cards", str(cards), *sync, str(entry.path)]
    spread = run(*words, cards=cards)
    assert (plain.returncode, spread.returncode) == (0, 0), plain.stderr + spread.stderr
    assert same_log(plain.stdout, spread.stdout, tolerance=1e-3) is None, spread.stderr
    if cards > 1:
        assert ("was spread in" in spread.stderr) == (entry.expect != "one_card"), spread.stderr


def test_the_document_says_what_was_spread() -> None:
    script = str(ROOT / "benchmarks" / "scripts" / "train.py")
    count = torch.cuda.device_count()
    words = ["--model", "mlp", "--batch", "256", "--steps", "5", "--warm-up", "5"]
    done = run("-m", "manycard.cli", "run", "--json", script, *words, cards=count)
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout)["spread"]
    assert report["spread"] == (10 if count > 1 else 0)
