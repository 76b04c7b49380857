"""Trials in processes of their own: whatever becomes of one is a result."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from manycard.benchmark import trial
from manycard.benchmark.trial import TrialSpec, make_subject, run_trial
from manycard.planner import Candidate
from tests.unit.launch.processes import running_children

SPEC = TrialSpec("mlp", "cpu:2", 8, "fp32", small=True, seconds=0.1)


def test_ranks_are_timed_together() -> None:
    found = run_trial(TrialSpec(**{**asdict(SPEC), "candidate": asdict(Candidate("ddp", 2, accumulate=2))}))
    assert found["error"] == ""
    assert found["step_ms"] > 0
    assert found["memory_mib"] is None


def test_a_trial_that_fails_says_why(tmp_path: Path) -> None:
    # Precision "default" sets no flags of this process.
    changed = {"candidate": asdict(Candidate("torch_dp", 2)), "precision": "default"}
    spec = TrialSpec(**{**asdict(SPEC), **changed})
    (tmp_path / "trial.json").write_text(json.dumps(asdict(spec)))
    assert trial.main(tmp_path) == 0
    found = json.loads((tmp_path / "result.json").read_text())
    assert "nn.DataParallel needs real GPUs" in found["error"]


def test_a_trial_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "PATIENCE", 0.3)
    before = running_children()
    found = run_trial(SPEC)
    assert "nothing came of it" in found["error"]
    assert running_children() <= before


def test_a_count_needs_neither_values_nor_a_batch() -> None:
    subject = make_subject(TrialSpec("gpt2-xl", "cpu:1", 1), on_meta=True)
    assert subject.samples == 1
    parameters = list(subject.module.parameters())
    assert all(parameter.is_meta for parameter in parameters)
    assert sum(parameter.numel() for parameter in parameters) == pytest.approx(1.56e9, rel=0.01)
