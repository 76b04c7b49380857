"""``strategy="auto"``: one line, the same training, and nothing altered by having planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manycard as mc
from manycard.cards import Card
from manycard.errors import ManycardError
from manycard.parallel import auto
from manycard.planner import Candidate, Plan, make_plan
from manycard.planner.cache import cache_folder, keep_plan, kept_plan, plan_key
from manycard.trials.confirm import Timing, run_candidate
from manycard.trials.subject import Subject
from tests.unit.planner.recorded import cifar, tiny

X = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def loss_fn(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYCARD_CACHE", str(tmp_path))
    return tmp_path


def train(strategy: str, cards: str = "cpu:2", steps: int = 3) -> tuple[list[float], nn.Module, int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 2))
    parallel = mc.Parallel(strategy, cards=cards, seed=1)
    spread, optimizer = parallel.setup(model, torch.optim.Adam(model.parameters(), lr=0.05))
    step = parallel.train_step(loss_fn, spread, optimizer)
    losses = [step((X, Y)).item() for _ in range(steps)]
    parallel.check_lockstep(spread)
    used = len(parallel.cards)
    parallel.close()
    return losses, model, used


def assert_same(one: tuple[list[float], nn.Module, int], other: tuple[list[float], nn.Module, int]) -> None:
    assert one[0] == other[0]
    for own, their in zip(one[1].state_dict().values(), other[1].state_dict().values(), strict=True):
        assert torch.equal(own, their)


def test_on_simulated_cards_it_is_dp_and_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    planned = train("auto")
    said = [line for line in capsys.readouterr().err.splitlines() if "strategy auto" in line]
    assert len(said) == 1
    assert "dp on 2 cards" in said[0]
    assert_same(planned, train("dp"))


def test_a_plan_for_fewer_cards_trains_as_those(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def plan(subject: Subject, cards: Sequence[Card], say: Any = None) -> Plan:
        # A real trial, which draws for dropout and trains: of copies.
        found = run_candidate(subject, Candidate("dp", 2), cards, Timing(steps=2, warm_up=1))
        assert found.error == ""
        return make_plan(tiny())

    monkeypatch.setattr(auto, "make_auto_plan", plan)
    planned = train("auto")
    assert planned[2] == 1
    assert "too small to spread" in " ".join(make_plan(tiny()).reasons)
    assert "on 1 card" in capsys.readouterr().err
    assert_same(planned, train("dp", cards="cpu:1"))


def test_a_module_that_cannot_be_tried_trains_with_dp(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(subject: Any, cards: Any, say: Any = None) -> Plan:
        raise ManycardError("one step on one card failed: it holds a socket")

    monkeypatch.setattr(auto, "make_auto_plan", fails)
    assert_same(train("auto"), train("dp"))
    assert "dp on all cards, unmeasured: one step on one card failed: it holds a socket" in capsys.readouterr().err


def test_all_models_of_a_run_are_on_the_cards_that_the_first_step_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = iter([make_plan(tiny())])  # a second plan would fail
    monkeypatch.setattr(auto, "make_auto_plan", lambda *_, **__: next(plans))

    def train_two(strategy: str, cards: str) -> list[float]:
        torch.manual_seed(0)
        models = [nn.Linear(8, 2), nn.Linear(8, 2)]
        parallel = mc.Parallel(strategy, cards=cards, seed=1)
        steps = []
        for model in models:
            spread, optimizer = parallel.setup(model, torch.optim.Adam(model.parameters(), lr=0.05))
            steps.append(parallel.train_step(loss_fn, spread, optimizer))
        losses = [step((X, Y)).item() for _ in range(3) for step in steps]
        parallel.close()
        return losses

    assert train_two("auto", "cpu:2") == train_two("dp", "cpu:1")


def test_in_a_rank_it_is_ddp(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert auto.first_strategy("auto") == ("ddp", False)
    assert "this process is a rank" in capsys.readouterr().err
    assert auto.first_strategy("single") == ("single", False)


def test_ranks_that_would_be_faster_are_named_and_not_taken() -> None:
    step = replace(cifar().step, graphed=(), host_ms=100.0, no_graphs="it waits")
    facts = cifar(cards=cifar().cards * 4, batch=1024, step=step, one_process=True)
    plan = make_plan(facts)
    assert plan.strategy != "ddp"
    row = next(row for row in plan.predictions if row.candidate.strategy == "ddp")
    assert "can't become ranks" in row.why_not


def test_auto_can_be_given_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MANYCARD_STRATEGY", "auto")
    train("single")
    said = capsys.readouterr().err
    assert "strategy='auto' from the command line replaces 'single'" in said
    assert "strategy auto: dp on 2 cards" in said


# ---- the cache ---------------------------------------------------------------------------------------------


def test_a_plan_is_found_again_only_for_its_key(own_cache: Path) -> None:
    assert cache_folder().is_relative_to(own_cache)
    one, other = plan_key({"batch": 8}), plan_key({"batch": 16})
    assert one != other
    keep_plan(one, {"line": "dp"})
    assert kept_plan(one) == {"line": "dp", "key": one}
    assert kept_plan(other) is None


def test_a_broken_file_or_folder_is_no_plan(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = plan_key({})
    keep_plan(key, {"line": "dp"})
    path = cache_folder() / f"{key}.json"
    path.write_text("{half")
    assert kept_plan(key) is None
    path.write_text("[]")
    assert kept_plan(key) is None
    (own_cache / "file").write_text("")
    monkeypatch.setenv("MANYCARD_CACHE", str(own_cache / "file"))
    keep_plan(key, {"line": "dp"})
    assert kept_plan(key) is None


def test_a_plan_made_before_is_taken_without_measuring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = {"choice": vars(make_plan(tiny()).choice), "line": "dp on 1 card"}
    monkeypatch.setattr(auto, "kept_plan", lambda key: kept)
    monkeypatch.setattr(auto, "make_auto_plan", lambda *_, **__: pytest.fail("it was measured again"))
    planned = train("auto")
    assert planned[2] == 1
    assert "dp on 1 card (planned before)" in capsys.readouterr().err
    # One for more cards than there are doesn't fit, and is made anew.
    monkeypatch.setattr(auto, "kept_plan", lambda key: {"choice": {**kept["choice"], "cards": 9}, "line": "x"})  # type: ignore[dict-item]
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        train("auto")
