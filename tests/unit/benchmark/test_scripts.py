"""A user's script as a row: measured from inside, unmodified, and failures of every kind as rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import manycard as mc
from manycard.benchmark import MatrixSettings, Measurement, read_axes
from manycard.benchmark.isolated import run_row
from manycard.benchmark.matrix import matrix_rows
from manycard.benchmark.scripts import ScriptWatch
from manycard.cards import choose_cards
from manycard.errors import SettingError
from manycard.launch import Script
from tests.unit.launch.processes import running_children

SCRIPT = """
import sys, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import manycard as mc

x = torch.randn(600, 20, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x[:, :3].argmax(1))
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
parallel = mc.Parallel(strategy="ddp", cards="all")
model, optimizer = parallel.setup(model, optimizer)
loader = parallel.loader(data, batch_size=48, shuffle=True)
step = None if "loop" in sys.argv else parallel.train_step(
    lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), model, optimizer)
epochs = int(sys.argv[1])
seen = open(sys.argv[2], "w")
for epoch in range(epochs):
    for x, y in loader:
        if step is None:
            optimizer.zero_grad()
            parallel.backward(F.cross_entropy(model(x), y))
            optimizer.step()
        else:
            step((x, y))
        print(len(y), parallel.accumulate, parallel.precision.name, file=seen, flush=True)
parallel.close()
print("ended by itself", file=seen)
"""


def measured(folder: Path, source: str, *arguments: str, strategy: str = "dp", **settings: Any) -> Measurement:
    script = folder / "train.py"
    script.write_text(source)
    limit = settings.pop("time_limit", 60.0)
    made = MatrixSettings(
        **{
            "workloads": (),
            "cards": choose_cards("cpu:2").cards,
            "strategies": (strategy,),
            "script": Script(str(script), arguments),
            "steps": 12,
            **settings,
        }
    )
    (spec,) = matrix_rows(made)
    before = running_children()
    row = run_row(spec, None, limit)
    assert running_children() <= before
    return row


def test_a_script_is_timed_in_the_rows_strategy_and_ends_when_enough_is_known(tmp_path: Path) -> None:
    row = measured(tmp_path, SCRIPT, "1000000", str(tmp_path / "seen"), strategy="ddp")
    assert row.error is None, row.trace
    assert (row.workload, row.strategy, row.scaling, row.batch) == ("train.py", "ddp", "strong", 48)
    assert row.steps is not None
    assert row.steps >= 12
    assert row.samples_per_s == pytest.approx(48e3 / row.step_ms, rel=0.35)  # type: ignore[operator]
    assert row.losses[0] == pytest.approx(1.1, abs=0.15)
    assert "ended by itself" not in (tmp_path / "seen").read_text()


def test_settings_of_the_row_take_the_place_of_the_scripts_in_its_own_loop_too(tmp_path: Path) -> None:
    row = measured(
        tmp_path,
        SCRIPT,
        "1000000",
        str(tmp_path / "seen"),
        "loop",
        strategy="single",
        axes=read_axes(["accumulate=3", "precision=bf16"], script=True),
        batch=20,
    )
    assert row.error is None, row.trace
    assert row.batch == 20
    assert row.precision == "bf16"
    assert (tmp_path / "seen").read_text().splitlines()[0] == "20 3 bf16"


def test_a_script_that_ends_early_gives_what_there_is_and_says_so(tmp_path: Path) -> None:
    row = measured(tmp_path, SCRIPT, "1", str(tmp_path / "seen"), steps=500)
    assert row.error is None, row.trace
    assert row.note == "the script ended by itself after 13 steps"
    assert row.samples_per_s is not None
    assert "ended by itself" in (tmp_path / "seen").read_text()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import manycard as mc\nmc.Parallel('dp').close()", "no training step that could be timed"),
        (
            SCRIPT.replace("for x, y in loader:", "for x, y in [(x[:8], data[:8][1])]:"),
            "can't be counted: its batch is not from parallel.loader",
        ),
    ],
    ids=["no step", "own batches in a loop"],
)
def test_a_script_that_cannot_be_measured_is_a_row_that_says_why(source: str, said: str, tmp_path: Path) -> None:
    row = measured(tmp_path, source, "1", str(tmp_path / "seen"), "loop")
    assert row.error is not None
    assert said in row.error
    assert row.samples_per_s is None


def test_a_script_that_hangs_is_ended_and_its_row_shows_where_it_stood(tmp_path: Path) -> None:
    source = SCRIPT.replace(
        "        print(len(y)", "        if loader.epoch == 0 and len(y) == 24: wait_for_ever()\n        print(len(y)"
    )
    source = "import time\ndef wait_for_ever():\n    time.sleep(1e6)\n" + source
    row = measured(tmp_path, source, "9", str(tmp_path / "seen"), steps=10_000, time_limit=20.0)
    assert row.error is not None
    assert row.error.startswith("no result within 20 s: 13 steps were done")
    assert row.trace is not None
    assert "wait_for_ever" in row.trace


def test_a_batch_size_of_a_dataloader_cannot_be_changed_and_that_is_said(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    cards = choose_cards("cpu:2").cards
    (spec,) = matrix_rows(MatrixSettings((), cards, ("dp",), batch=20, script=Script(str(script))))
    parallel = mc.Parallel("dp", cards="cpu:2")
    with ScriptWatch(spec, tmp_path, 0.0):
        assert parallel.loader(torch.zeros(64, 2), batch_size=8).batch_size == 20
        with pytest.raises(SettingError, match="--batch=20"):
            parallel.loader(DataLoader(TensorDataset(torch.zeros(64, 2)), 8))
    assert parallel.loader(torch.zeros(64, 2), batch_size=8).batch_size == 8, "everything is as it was"
    parallel.close()


def test_a_row_of_a_script_travels_as_json(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    made = MatrixSettings((), choose_cards("cpu:2").cards, ("dp",), script=Script(str(script), ("--lr", "1")))
    (spec,) = matrix_rows(made)
    assert type(spec).from_json(spec.to_json()) == spec
    assert json.loads(spec.to_json())["script"] == [str(script), "--lr", "1"]
    assert spec.environment == {"MANYCARD_STRATEGY": "dp", "MANYCARD_CARDS": "cpu:2"}
