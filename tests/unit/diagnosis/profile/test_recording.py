"""Profiles of real steps on simulated cards: planted causes are found, and steps outside cost nothing."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import manycard as mc
from manycard.cli import main
from manycard.diagnosis.profile import PARTS, Profile, ProfileSettings
from manycard.diagnosis.profile.trace import read_trace
from manycard.engine.driving import spans
from manycard.errors import SettingError
from manycard.hangs import PULSE
from manycard.parallel.profiling import start_recording


class Samples(Dataset[Tensor]):
    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Tensor:
        if self._seconds and index % 4 == 0:
            time.sleep(self._seconds)
        return torch.ones(32)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


Run = Callable[..., Profile]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made: list[mc.Parallel] = []

    def profile(strategy: str = "dp", data: Samples | None = None, own: float = 0.0) -> Profile:
        parallel = mc.Parallel(strategy, cards="cpu:2", seed=0)
        made.append(parallel)
        net = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 8))
        model, optimizer = parallel.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        step = parallel.train_step(loss_fn, model, optimizer)
        loader = parallel.loader(data or Samples(), batch_size=8)
        profiling = parallel.profile(loader, steps=5, skip=4, out=str(tmp_path / "traces"))
        for x in profiling:
            step(x)
            time.sleep(own)
        assert profiling.result is not None
        return profiling.result

    yield profile
    for parallel in made:
        parallel.close()


def test_a_loader_that_holds_the_cards_up_is_the_first_finding(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(data=Samples(0.02))
    first = found.opportunities[0]
    assert first.finding.cause == "the cards wait for data"
    assert "num_workers='auto'" in first.finding.fix
    assert min(card.input for card in found.cards) >= 40
    assert "1. the cards wait for data" in capsys.readouterr().err


def test_code_of_the_scripts_own(run: Run) -> None:
    found = run(own=0.06)
    assert found.opportunities[0].finding.cause.startswith("the script's own code")
    assert found.cards[0].own >= 60


def test_the_parts_of_each_card_add_up(run: Run) -> None:
    found = run()
    assert [card.card for card in found.cards] == ["cpu:0", "cpu:1"]
    assert found.steps == 5
    for card in found.cards:
        parts = [getattr(card, name) for name in PARTS]
        assert sum(parts) == pytest.approx(card.step, rel=1e-3)
        assert min(card.forward, card.backward, card.update) > 0
    with gzip.open(found.traces[0], "rt") as file:
        assert json.load(file)["distributedInfo"]["rank"] == 0, "tools that compare ranks ask for it"
    trace = read_trace(Path(found.traces[0]))
    assert {"step", "loader", "forward", "backward", "reduce", "update", "job", "beat"} <= {s.what for s in trace.spans}
    again = Profile.of(json.loads(json.dumps(found.as_dict())))
    assert [each.finding.cause for each in again.opportunities] == [each.finding.cause for each in found.opportunities]


def test_nothing_is_left_on_after_it(run: Run) -> None:
    run("single")
    assert not spans._on
    assert PULSE.listeners == []
    assert spans.span("forward") is spans.span("backward")


def test_what_is_left_outside_costs_no_twentieth_of_a_step() -> None:
    """A step of a card has about ten parts; the smallest steps take about a millisecond."""
    begin = time.perf_counter()
    for _ in range(10_000):
        with PULSE.busy("step"), spans.span("forward", "cpu:0"):
            pass
        PULSE.beat()
    assert (time.perf_counter() - begin) / 10_000 < 50e-6


def test_a_context_that_ends_early_and_wrong_settings(tmp_path: Path) -> None:
    parallel = mc.Parallel("single", cards="cpu:1")
    net = nn.Linear(2, 1)
    model, optimizer = parallel.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with parallel.profile(skip=0, out=str(tmp_path), say=False) as profiling:
        for _ in range(3):
            parallel.backward(model(torch.ones(4, 2)).mean())
            optimizer.step()
    assert profiling.result is not None
    assert profiling.result.steps == 2
    with pytest.raises(SettingError, match="steps=0: it must be a whole number of at least 1"):
        parallel.profile(steps=0)
    parallel.close()


SCRIPT = """
import time, torch
from torch import nn
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader([torch.ones(16) for _ in range(400)], batch_size=8, collate_fn=
    lambda rows: (time.sleep(0.03), torch.stack(rows))[1])
for x in data:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("to its end")
"""


def profiled(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "manycard.cli", "profile", "--cards", "cpu:2", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_the_command_on_a_script_that_knows_nothing_of_manycard(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = profiled("--steps", "3", "--out", str(tmp_path), "--json", str(script))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["steps"] == 3
    assert [card["card"] for card in document["cards"]] == ["cpu:0", "cpu:1"]
    assert document["findings"][0]["cause"] == "the cards wait for data"
    assert document["findings"][0]["gain"] > 1.2
    assert "to its end" not in done.stderr
    assert Path(document["traces"][0]).exists()


def test_the_command_on_a_script_of_too_few_steps(tmp_path: Path) -> None:
    script = tmp_path / "short.py"
    script.write_text("print('nothing to train')")
    done = profiled(str(script))
    assert done.returncode == 1
    assert "made too few steps" in done.stderr


def test_the_command_with_wrong_settings() -> None:
    assert main(["profile", "--steps", "0", __file__]) == 2
    assert main(["profile", "nowhere.py"]) == 2


def test_auto_is_planned_before_it_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYCARD_CACHE", str(tmp_path / "plans"))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = profiled("--strategy", "auto", "--steps", "2", "--skip", "1", "--json", str(script))
    assert done.returncode == 0, done.stderr
    assert "was spread" in done.stderr
    assert all(card["forward"] > 0 for card in json.loads(done.stdout)["cards"])


def test_a_rank_that_fails_leaves_a_document_all_the_same(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise ValueError('no such word')")
    done = profiled("--strategy", "ddp", "--json", str(script))
    assert done.returncode == 1
    assert json.loads(done.stdout)["status"] == 1
    assert "no such word" in done.stderr


def test_a_script_that_asks_for_ranks_by_itself_is_told_how(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text("import manycard as mc\nmc.Parallel('ddp', cards='cpu:2')\n")
    done = profiled(str(script))
    assert done.returncode == 2
    assert "it asks for one process per card. Fix: give --strategy ddp" in done.stderr


def test_a_pipelines_passes_count_for_the_cards_of_their_stages(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(32, 8), *(nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 8)) for _ in range(3)))
    pipeline = mc.Pipeline(net, "cpu:2", stages=["1"], micro_batches=2)
    step = pipeline.train_step(loss_fn, torch.optim.SGD(net.parameters(), lr=0.1))
    found: list[Profile] = []
    recording = start_recording(pipeline.strategy, ProfileSettings(4, 3, str(tmp_path / "traces")), found.append)
    for _ in range(9):
        step(torch.ones(64, 32))
    recording.end()
    pipeline.close()
    first, second = found[0].cards
    assert first.forward > 0 < first.backward
    assert second.forward > first.forward, "three blocks of four are there"
    assert second.backward > 0
