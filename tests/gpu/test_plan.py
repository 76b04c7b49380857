"""Planning on real cards: trials that leave nothing, predictions beside what is measured, parts that fit."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manycard as mc
from manycard.benchmark.trial import TrialSpec, make_subject, run_trial
from manycard.cards import choose_cards
from manycard.launch import cards_setting
from manycard.planner import Candidate, Facts, make_plan
from manycard.trials.confirm import run_candidate
from manycard.trials.gather import gather_facts
from manycard.trials.links import card_speeds, measure_links

COUNTS = [count for count in (1, 2, 4, 8) if count <= max(torch.cuda.device_count(), 1)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYCARD_CACHE", str(tmp_path))


def loss_fn(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(512, 10))


def make_batch(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 512, generator=generator), torch.randint(10, (samples,), generator=generator)


@pytest.mark.parametrize("count", COUNTS)
def test_links_and_speeds_are_measured(count: int) -> None:
    cards = choose_cards(count).cards
    speeds = card_speeds(cards)
    assert speeds[0] == 1.0
    assert len(speeds) == count
    links = measure_links(cards)
    if count > 1:
        assert links.copy_gb_per_s is not None
        assert links.copy_gb_per_s > 1
        times = [ms for _, ms in links.all_reduce]
        assert times[-1] > times[0] > 0
        assert links.p2p is not None


@pytest.mark.parametrize("count", COUNTS)
def test_predicted_steps_and_memory_are_near_what_a_trial_measures(count: int) -> None:
    cards = choose_cards(count).cards
    spec = TrialSpec(
        "resnet18-cifar", ",".join(map(str, range(count))) + ("," if count == 1 else ""), 512 * count, "bf16"
    )
    subject = make_subject(spec)
    facts = gather_facts(subject, cards)
    assert facts.step.graphed, facts.step.no_graphs
    candidate = Candidate("dp", count, graphs=True)
    found = run_candidate(subject, candidate, cards)
    assert found.error == ""
    row = next(row for row in make_plan(facts).predictions if row.candidate == candidate)
    assert row.predicted_ms == pytest.approx(found.step_ms, rel=0.15)
    assert row.predicted_mib == pytest.approx(found.memory_mib, rel=0.25)


@pytest.mark.parametrize("count", COUNTS)
def test_planning_leaves_the_training_as_it_would_have_been(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    def train(strategy: str, cards: int) -> tuple[list[float], int]:
        model = make_model()
        parallel = mc.Parallel(strategy, cards=cards, seed=3)
        spread, optimizer = parallel.setup(model, torch.optim.Adam(model.parameters(), lr=1e-3))
        step = parallel.train_step(loss_fn, spread, optimizer, graphs="off")
        losses = [step(make_batch(64 * count)).item() for _ in range(4)]
        used = len(parallel.cards)
        parallel.close()
        return losses, used

    planned, used = train("auto", count)
    assert "strategy auto" in capsys.readouterr().err
    assert planned == train("dp", used)[0]
    again, _ = train("auto", count)
    assert "(planned before)" in capsys.readouterr().err
    assert again == planned


@pytest.mark.parametrize("count", COUNTS)
def test_parts_that_fit_are_found_and_train_as_the_whole(count: int) -> None:
    cards = choose_cards(count).cards

    class Hungry(nn.Module):
        """Keeps 64 MiB a sample for its backward pass."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            wide = x[:, :1].expand(-1, 2**20)[:, :, None] * self.scale
            return wide.square().mean((1, 2))

    def step_with(per_card: Any) -> tuple[float, Any]:
        torch.manual_seed(0)
        model = Hungry()
        parallel = mc.Parallel("dp", cards=count, seed=0, per_card_batch=per_card)
        spread, optimizer = parallel.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        step = parallel.train_step(lambda model, batch: model(batch).mean(), spread, optimizer, graphs="off")
        loss = step(torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))).item()
        result = loss, (step.per_card_batch, step.parts, model.scale.detach().cpu())
        parallel.close()
        return result

    free = min(torch.cuda.mem_get_info(card.device)[0] for card in cards)
    samples = count * int(1.5 * free / 2**27)  # the whole batch needs about one and a half times what there is
    found, (per_card, parts, scale) = step_with("auto")
    assert parts > 1
    expected, (_, _, other) = step_with(max(1, per_card // 2))
    assert found == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(scale, other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("count", [count for count in COUNTS if count > 1])
def test_trials_in_processes_of_their_own(count: int) -> None:
    spec = TrialSpec("mlp", cards_setting(choose_cards(count).cards), 256 * count, "bf16", seconds=0.5)
    found = run_trial(spec)
    assert found["error"] == ""
    plan = make_plan(Facts.from_document(found["facts"]))
    assert plan.choice.graphs
    for candidate in (Candidate("dp", count, graphs=True), Candidate("ddp", count)):
        trial = run_trial(replace(spec, candidate=asdict(candidate)))
        assert trial["error"] == ""
        assert trial["step_ms"] > 0
        assert trial["memory_mib"] > 0
