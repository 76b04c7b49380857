"""BatchNorm in a pipeline: small last batches, evaluation mode, and activation checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manycard.pipeline.cutting import micro_batch_sizes

from .pipelined import pipelined, sgd


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
    )


def loss_fn(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def batches(*sizes: int) -> list[Tensor]:
    draws = torch.Generator().manual_seed(5)
    return [torch.randn(size, 5, generator=draws) for size in sizes]


def train_in_parts(model: nn.Module, data: list[Tensor], micro_batches: int) -> list[float]:
    """Plain PyTorch on the same micro-batches, one after another."""
    optimizer, losses = sgd(model), []
    for batch in data:
        optimizer.zero_grad()
        total = 0.0
        for part in batch.split(micro_batch_sizes(len(batch), 1, micro_batches, 2)[0]):
            loss = loss_fn(model, part) * (len(part) / len(batch))
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_small_last_batches_train_as_plain_pytorch_on_the_same_micro_batches(
    micro_batches: int, checkpointed: bool
) -> None:
    """9, 5, 3 and 2 samples: cut into 4, some micro-batch would hold a single one. Running statistics agree too."""
    alone = made()
    spread = copy.deepcopy(alone)
    data = batches(16, 9, 5, 3, 2)
    expected = train_in_parts(alone, data, micro_batches)
    with pipelined(
        spread, "cpu:2", stages=["3"], micro_batches=micro_batches, checkpoint_activations=checkpointed
    ) as pipeline:
        step = pipeline.train_step(loss_fn, sgd(spread))
        assert [step(batch).item() for batch in data] == pytest.approx(expected, rel=1e-5)
    for (name, mine), theirs in zip(alone.state_dict().items(), spread.state_dict().values(), strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("replicas", [1, 2])
def test_in_evaluation_mode_any_batch_is_that_of_one_card(replicas: int) -> None:
    alone = made()
    alone[1].eval()
    alone[4].eval()
    alone[1].running_mean.normal_()
    spread = copy.deepcopy(alone)
    mine, theirs = sgd(alone), sgd(spread)
    with pipelined(spread, f"cpu:{2 * replicas}", stages=["3"], replicas=replicas, micro_batches=4) as pipeline:
        step = pipeline.train_step(loss_fn, theirs)
        for batch in batches(9, 3, 1):
            mine.zero_grad()
            loss = loss_fn(alone, batch)
            loss.backward()
            mine.step()
            torch.testing.assert_close(step(batch), loss.detach())
    for one, other in zip(alone.state_dict().values(), spread.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other)


def test_replicas_get_enough_samples_or_none() -> None:
    spread = made()
    with pipelined(spread, "cpu:4", stages=["3"], replicas=2, micro_batches=3) as pipeline:
        step = pipeline.train_step(loss_fn, sgd(spread))
        for batch in batches(16, 5, 3):
            assert step(batch).isfinite()


def test_one_sample_is_refused_as_on_one_card_and_the_next_step_works() -> None:
    spread = made()
    with pipelined(spread, "cpu:2", stages=["3"], micro_batches=4) as pipeline:
        step = pipeline.train_step(loss_fn, sgd(spread))
        one, several = batches(1, 6)
        step(several)
        with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
            step(one)
        assert "in stage 0" in " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        step(several)


def test_checkpoints_draw_what_a_pipeline_without_them_draws() -> None:
    def losses(*, checkpointed: bool) -> list[float]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.5))
        model.append(nn.Linear(8, 2))
        with pipelined(model, "cpu:2", stages=["3"], micro_batches=2, checkpoint_activations=checkpointed) as pipeline:
            step = pipeline.train_step(loss_fn, sgd(model), check_loss=False)
            return [step(batch).item() for batch in batches(8, 8, 8, 6)]

    assert losses(checkpointed=True) == losses(checkpointed=False)
