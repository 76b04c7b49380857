"""The engine's step with several replicas on one GPU: threads, streams and buckets on CUDA, wherever there is one card.

NCCL does not join a GPU to itself, so these replicas are added up by plain sums; only tests with several cards show
the rest.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from manycard.cards import Card
from manycard.data import Feed
from manycard.precision import make_precision
from manycard.strategies import StrategyOptions, make_strategy
from manycard.strategies.train_step import TrainStep, TrainStepSettings

COUNTS = [1, 2, 3]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))


def initialised() -> nn.Module:
    model = make_model().cuda()
    model(torch.zeros(2, 3, 8, 8, device="cuda"))
    return model


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    sizes = [12, 12, 7, 1][:count] if count <= 4 else [12] * count
    return [
        (torch.randn(size, 3, 8, 8, generator=generator), torch.randint(10, (size,), generator=generator))
        for size in sizes
    ]


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def step_on(count: int, model: nn.Module, optimizer: Any, precision: str = "fp32", **settings: Any) -> Any:
    cards = [Card(position, torch.device("cuda:0"), model="shared") for position in range(count)]
    strategy = make_strategy("dp", cards, make_precision(precision), Feed(), StrategyOptions())
    spread = strategy.setup_module(model)
    strategy.setup_optimizer(spread, optimizer)
    return strategy, spread, TrainStep(strategy, loss_fn, spread, [optimizer], None, TrainStepSettings(**settings))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_replicas_on_one_gpu_train_as_one_does(count: int, fused: bool, accumulate: int) -> None:
    alone, together = initialised(), initialised()
    own = torch.optim.AdamW(alone.parameters(), 1e-2, fused=fused)
    shared = torch.optim.AdamW(together.parameters(), 1e-2, fused=fused)
    strategy, spread, step = step_on(count, together, shared, accumulate=accumulate, clip_norm=0.5)
    group: list[Any] = []
    for images, labels in batches(4) + batches(4):
        loss = step((images, labels))
        batch = (images.cuda(), labels.cuda())
        torch.testing.assert_close(loss, loss_fn(alone, batch).detach(), rtol=1e-4, atol=1e-5)
        group.append(batch)
        if len(group) == accumulate:
            own.zero_grad()
            samples = sum(len(labels) for _, labels in group)
            for each in group:
                (loss_fn(alone, each) * len(each[1]) / samples).backward()
            torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
            own.step()
            group = []
    for expected, actual in zip(alone.parameters(), together.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    strategy.check_lockstep(spread)
    strategy.close()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_converges(precision: str) -> None:
    model = initialised()
    strategy, spread, step = step_on(2, model, torch.optim.AdamW(model.parameters(), 1e-2), precision)
    batch = batches(1)[0]
    losses = [step(batch) for _ in range(60)]
    strategy.check_lockstep(spread)
    strategy.close()
    assert losses[-1].item() < 0.2 * losses[0].item()


def test_kept_losses_hold_their_own_values() -> None:
    model = initialised()
    strategy, _, step = step_on(2, model, torch.optim.SGD(model.parameters(), 0.05))
    kept = [step(batches(1)[0]) for _ in range(10)]
    read = [loss.item() for loss in kept]
    strategy.close()
    assert len(set(read)) == 10


def test_memory_does_not_grow_over_200_steps() -> None:
    model = initialised()
    strategy, _, step = step_on(2, model, torch.optim.AdamW(model.parameters(), 1e-3))
    batch = batches(1)[0]
    for _ in range(20):
        step(batch)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(200):
        step(batch)
    torch.cuda.synchronize()
    grown = torch.cuda.memory_allocated() - before
    strategy.close()
    assert grown <= 1024


def test_an_error_on_one_replica_leaves_the_step_usable() -> None:
    model = initialised()
    reference = copy.deepcopy(model)
    strategy, spread, step = step_on(2, model, torch.optim.SGD(model.parameters(), 0.1), check_loss=False)
    batch = batches(1)[0]
    bad = (batch[0], batch[1].clone())
    bad[1][-1] = -5
    with pytest.raises(ValueError, match="spilled") as caught:
        TrainStep(strategy, _spilling, spread, [], None, TrainStepSettings(check_loss=False))(bad)
    assert "card 1" in "".join(getattr(caught.value, "__notes__", caught.value.args))
    step(batch)
    own = torch.optim.SGD(reference.parameters(), 0.1)
    loss_fn(reference, (batch[0].cuda(), batch[1].cuda())).backward()
    own.step()
    for expected, actual in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    strategy.close()


def _spilling(model: Any, batch: Any) -> torch.Tensor:
    if (batch[1] < 0).any():
        raise ValueError("spilled")
    return loss_fn(model, batch)
