"""``manycard plan`` and ``manycard run --strategy auto``, as a user calls them, on simulated cards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from manycard.cli import main
from manycard.launch import Script
from manycard.script.planning import ScriptPlanRequest, _runnable, notebook_code

LOOP = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(400, 6), batch_size=8)
for x in loader:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("the end")
"""
API = """
import torch
import manycard as mc
model = torch.nn.Linear(6, 1)
parallel = mc.Parallel("single", cards="cpu:1")
model, optimizer = parallel.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
step = parallel.train_step(lambda model, batch: model(batch).square().mean(), model, optimizer)
for batch in parallel.loader(torch.randn(400, 6), batch_size=8):
    step(batch)
"""
RANKS = """
import os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 6)).square().mean().backward()
    optimizer.step()
"""


def _plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, object]]:
    status = main(["plan", "--json", *words])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("text", "name", "written", "batch"),
    [(LOOP, "loop.py", "loop", 8), (API, "api.py", "api", 8), (RANKS, "ranks.py", "ranks", 8)],
    ids=["loop", "api", "ranks"],
)
def test_a_script_is_planned_from_its_first_steps(
    text: str, name: str, written: str, batch: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / name
    script.write_text(text)
    status, document = _plan(capsys, "--cards", "cpu:2", str(script))
    assert status == 0
    facts = document["facts"]
    assert isinstance(facts, dict)
    assert facts["written"] == written
    assert document["batch"] == batch
    assert (facts["input_rate"] is not None) == (written != "ranks")
    assert document["strategy"] == ("ddp" if written == "ranks" else "dp")


def test_a_notebook_is_planned_as_one(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# title"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "!pip list\n", "first = 1"]},
        {"cell_type": "code", "source": LOOP},
    ]
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps({"cells": cells, "nbformat": 4}))
    assert notebook_code(path).startswith("\n\nfirst = 1\n")
    script, written = _runnable(ScriptPlanRequest(Script(str(path), ("--lr", "1"))), tmp_path)
    assert written == "notebook"
    assert script.arguments == ("--lr", "1")
    assert LOOP.strip() in Path(script.name).read_text()


def test_a_workload_on_simulated_cards_says_what_it_could_not_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "deep" / "plan.html"
    words = ["plan", "--workload", "mlp", "--small", "--cards", "cpu:2", "--explain", "--html", str(page)]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "Are the cards real? 2 simulated cards" in out
    assert "were not measured" in out
    assert "Why not the others" in out
    assert "Plan: strategy='dp', cards=2" in out
    assert "measuring single on one card" in err
    assert "Are the cards real?" in page.read_text()


def test_cards_that_are_not_here_are_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--workload", "gpt2", "--small", "--precision", "bf16", "--cards-model", "8xH100 NVLink", "--nodes", "4"]
    status, document = _plan(capsys, *words)
    assert status == 0
    rows = document["predictions"]
    assert isinstance(rows, list)
    assert {row["how"] for row in rows} == {"predicted"}
    assert {row["cards"] for row in rows} == {1, 32}
    assert any("data sheet" in note for note in document["notes"])  # type: ignore[union-attr]


def test_cards_of_the_environment_are_no_word_against_stated_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MANYCARD_CARDS", "cpu:2")
    status, document = _plan(capsys, "--workload", "mlp", "--small", "--cards-model", "2xH100")
    assert status == 0
    assert {row["cards"] for row in document["predictions"]} == {1, 2}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give a script, or --workload NAME"),
        (["-m", "no_such_module_anywhere"], "there is no such module"),
        (["--workload", "mlp", "train.py"], "one training is to be planned"),
        (["nowhere.py"], "there is no such file"),
        (["nowhere.ipynb"], "it is no notebook"),
        (["--workload", "nothing"], "nothing"),
        (["--workload", "digits"], "it is measured in epochs of real data"),
        (["--workload", "mlp", "--cards-model", "8xH999"], "no figures for 'H999'"),
        (["--workload", "mlp", "--nodes", "2"], "this machine alone can be measured"),
        (["--workload", "mlp", "--cards-model", "H100", "--cards", "cpu:2"], "--cards-model names the cards"),
        (["--workload", "mlp", "--trials", "-1"], "--trials=-1"),
        (["--workload", "mlp", "--batch", "0"], "--batch=0"),
        (["--workload", "mlp", "--network", "0"], "--network=0.0"),
        (["--workload", "mlp", "--written", "well"], "--written='well'"),
        (["--workload", "mlp", "--precision", "int8"], "there is no such precision"),
    ],
)
def test_wrong_usage_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_a_script_without_a_step_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("raise ValueError('no data there')\n")
    assert main(["plan", "--cards", "cpu:2", str(script)]) == 1
    err = capsys.readouterr().err
    assert "before a training step was seen" in err
    assert "no data there" in err


def test_run_plans_once_and_then_runs_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYCARD_CACHE", str(tmp_path / "cache"))
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    words = [sys.executable, "-m", "manycard.cli", "run", "--strategy", "auto", "--cards", "cpu:2", str(script)]
    for said in ("strategy auto: dp, drop-in on 2 cards", "(planned before)"):
        found = subprocess.run(words, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr
        assert said in found.stderr
        assert found.stdout == "the end\n"
