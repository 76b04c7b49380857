"""Trials on simulated cards: what they give, and that they leave no trace in a training."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manycard.cards import choose_cards
from manycard.errors import ManycardError
from manycard.planner import Candidate, Measured, make_plan
from manycard.trials.confirm import Timing, run_candidate
from manycard.trials.deciding import decide
from manycard.trials.gather import gather_facts, stated_facts
from manycard.trials.subject import Subject
from tests.unit.planner.recorded import resnet50

CARDS = choose_cards("cpu:2").cards
SHORT = Timing(seconds=0.01, steps=2, warm_up=1)


def loss_fn(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture
def subject() -> Subject:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loss_fn(model, (torch.randn(12, 8), torch.randint(3, (12,)))).backward()
    optimizer.step()  # so that there is a state to leave alone
    return Subject("net", model, (optimizer,), loss_fn, (torch.randn(12, 8), torch.randint(3, (12,))))


def _everything(subject: Subject) -> list[Any]:
    states = [p.grad for p in subject.module.parameters()]
    for optimizer in subject.optimizers:
        states += [v for state in optimizer.state.values() for v in state.values()]
    return [t.clone() for t in [*subject.module.state_dict().values(), *states, torch.get_rng_state()]]


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate("single", 1),
        Candidate("single", 1, accumulate=3),
        Candidate("dp", 2),
        Candidate("dp", 2, accumulate=2),
        Candidate("dp", 2, drop_in=True),
    ],
    ids=lambda candidate: candidate.name,
)
def test_a_trial_measures_and_leaves_everything_as_it_was(subject: Subject, candidate: Candidate) -> None:
    random.seed(3)
    np.random.seed(3)
    before, numbers = _everything(subject), (random.getstate(), np.random.get_state()[1].tolist())
    found = run_candidate(subject, candidate, CARDS, SHORT)
    assert found.error == ""
    assert found.step_ms is not None
    assert found.step_ms > 0
    for own, kept in zip(_everything(subject), before, strict=True):
        assert torch.equal(own, kept)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == numbers
    assert subject.module.training


def test_the_copy_that_is_tried_is_trained(subject: Subject) -> None:
    module, (optimizer,) = subject.copies(torch.device("cpu"))
    own = {id(p) for p in module.parameters()}
    assert all(id(p) in own for group in optimizer.param_groups for p in group["params"])
    assert all(id(p) in own for p in optimizer.state)
    start = [p.detach().clone() for p in module.parameters()]
    loss_fn(module, subject.batch).backward()
    optimizer.step()
    assert any(not torch.equal(p, q) for p, q in zip(module.parameters(), start, strict=True))


def test_what_goes_wrong_is_the_trials_result(subject: Subject) -> None:
    def broken(model: Any, batch: Any) -> Tensor:
        raise RuntimeError("no such shape")

    found = run_candidate(replace(subject, loss_fn=broken), Candidate("dp", 2), CARDS, SHORT)
    assert found.step_ms is None
    assert "no such shape" in found.error

    def full(model: Any, batch: Any) -> Tensor:
        raise torch.OutOfMemoryError("3 GiB")

    assert "out of memory" in run_candidate(replace(subject, loss_fn=full), Candidate("single", 1), CARDS, SHORT).error
    assert "one process" in run_candidate(subject, Candidate("ddp", 2), CARDS, SHORT).error
    with pytest.raises(ManycardError, match="no such shape"):
        gather_facts(replace(subject, loss_fn=broken), CARDS, timing=SHORT)


def test_facts_of_simulated_cards_say_what_is_missing(subject: Subject) -> None:
    facts = gather_facts(replace(subject, input_rate=123.0), CARDS, timing=SHORT)
    assert [point.samples for point in facts.step.eager] == [3, 6, 12]
    assert facts.simulated
    assert facts.input_rate == 123.0
    assert facts.model.state_mib == pytest.approx(2 * facts.model.parameters_mib)
    assert facts.model.output_mib == pytest.approx(3 * 4 / 2**20)
    assert any("were not measured" in line for line in facts.unmeasured)
    plan = make_plan(facts)
    assert plan.strategy == "dp"
    row = next(row for row in plan.predictions if row.candidate.strategy == "single")
    assert row.measured
    assert all(row.memory_mib for row in plan.predictions)


def test_facts_of_cards_that_are_not_here(subject: Subject) -> None:
    facts = stated_facts(subject, "8xH100 NVLink", machines=2, network_gb_per_s=50.0, batch=160)
    assert facts.stated
    assert facts.all_cards == 16
    plan = make_plan(facts)
    assert plan.predictions[0].step_ms is not None
    assert any("data sheets" in note for note in plan.notes)
    assert all(not row.measured for row in plan.predictions)


def test_at_most_so_many_trials_and_no_more_when_time_is_up() -> None:
    facts = resnet50()
    tried: list[Candidate] = []

    def run(candidate: Candidate) -> Measured:
        tried.append(candidate)
        return Measured(60.0 + len(tried), 11_000.0)

    plan = decide(facts, run, most=2)
    assert len(tried) == 2
    assert plan.chosen.measured
    tried.clear()
    assert not decide(facts, run, seconds=-1.0).chosen.measured
    assert not tried
    assert not decide(facts, lambda _: None).chosen.measured
