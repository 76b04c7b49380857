"""Stages found by measuring real models."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manycard as mc
from manycard.pipeline.stages import StagePlan


class Slow(nn.Module):
    """A layer that takes `seconds` in its forward pass."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer, self.seconds = nn.Linear(4, 4), seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.layer(x)


def plan_of(model: nn.Module, x: Tensor, loss: Any = None, **settings: Any) -> StagePlan:
    """The plan that the first batch leads to."""
    pipeline = mc.Pipeline(model, micro_batches=2, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = pipeline.train_step(loss or (lambda model, x: model(x).square().mean()), optimizer, check_loss=False)
    step(x)
    pipeline.close()
    plan = pipeline._strategy.engine.plan
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    ("milliseconds", "starts"),
    [
        ((40, 5, 5, 5, 5), ["1"]),
        ((5, 5, 5, 5, 40), ["4"]),
        ((20, 20, 20, 20, 20, 20), ["3"]),
        ((10, 10, 10, 30, 10, 10, 10), ["3", "4"]),
    ],
)
def test_stages_are_balanced_by_measured_time(milliseconds: tuple[int, ...], starts: list[str]) -> None:
    model = nn.Sequential(*(Slow(each / 1000) for each in milliseconds))
    assert plan_of(model, torch.ones(4, 4), cards=f"cpu:{len(starts) + 1}").starts() == starts


def test_the_loss_counts_for_the_last_stage() -> None:
    def slow_loss(model: Any, x: Any) -> Any:
        out = model(x)
        time.sleep(0.06)
        return out.mean()

    model = nn.Sequential(*(Slow(0.02) for _ in range(4)))
    assert plan_of(model, torch.ones(4, 4), slow_loss, cards="cpu:2").starts() == ["3"]


def test_a_part_that_takes_longer_than_a_stage_should_is_opened() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(Slow(0.02) for _ in range(4))), nn.Linear(4, 4))
    assert plan_of(model, torch.ones(4, 4), cards="cpu:2").starts() == ["1.2"]


def test_memory_bounds_the_stages() -> None:
    """By time the cut is in the middle; the second card has room for one of the wide layers only."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    one = 4 * (256 * 256 + 256)
    settings = {"cards": "cpu:2", "memory": [40 * one, int(2.9 * one)]}
    # Weight and gradient take 2 of them, activations a little.
    assert plan_of(model, torch.ones(4, 256), **settings).starts() == ["3"]


def test_parameters_of_no_part_belong_where_they_are_first_used() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early, self.late = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("offset", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x * self.early)) * self.late + self.offset

    plan = plan_of(Late(), torch.ones(4, 4), cards="cpu:2", stages=["second"])
    homes = {name: plan.homes[name] for name in ("early", "late", "offset", "first.weight", "second.bias")}
    assert homes == {"early": 0, "late": 1, "offset": 1, "first.weight": 0, "second.bias": 1}


def test_a_container_is_not_one_checkpoint() -> None:
    model = nn.Sequential(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), nn.Linear(4, 4))
    plan = plan_of(model, torch.ones(4, 4), cards="cpu:2", stages=["1"], checkpoint_activations=True)
    assert [part.name for part in plan.parts] == ["0.0", "0.1", "0.2", "1"]


def test_planning_leaves_gradients_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    model[0].weight.grad = torch.ones(4, 4)
    pipeline = mc.Pipeline(model, "cpu:2")
    pipeline(torch.ones(4, 4))
    pipeline.close()
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4))
    assert model[1].weight.grad is None


def test_planning_leaves_no_trace_in_buffers_gradients_and_draws() -> None:
    def run(measured: bool) -> tuple[Tensor, Tensor, float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
        pipeline = mc.Pipeline(model, "cpu:2", stages="auto" if measured else ["3"], micro_batches=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        step = pipeline.train_step(lambda model, x: model(x).square().mean(), optimizer, check_loss=False)
        loss = step(torch.arange(16.0).view(4, 4))
        pipeline.close()
        return model[1].running_mean.clone(), model[1].num_batches_tracked.clone(), loss.item()

    for one, other in zip(run(True)[:2], run(False)[:2], strict=True):
        assert torch.equal(one, other)
    assert run(False)[1] == 1
