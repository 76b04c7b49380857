"""Replicas that are compiled: none runs into PyTorch's limit of recompilations, and all compute what plain ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._config_module import ConfigModule

import manycard as mc
from manycard.errors import SettingError

BACKEND = {"backend": "aot_eager", "dynamic": False}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def loss_fn(model: Any, batch: Any) -> Any:
    return model(batch).square().mean()


def counted(model: Any, batch: Any) -> Any:
    return {"sum": (model(batch).sum(), len(batch))}


def trained(strategy: str, cards: str, compile: Any, sizes: list[int]) -> tuple[list[float], list[Any]]:
    parallel = mc.Parallel(strategy=strategy, cards=cards, compile=compile)
    model = make_model()
    model, optimizer = parallel.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    step = parallel.train_step(loss_fn, model, optimizer)
    generator = torch.Generator().manual_seed(1)
    losses, seen = [], []
    for size in sizes:
        batch = torch.randn(size, 4, generator=generator)
        losses.append(float(step(batch)))
        seen.append(parallel.evaluate(counted, model, [batch])["sum"])
    parallel.close()
    return losses, seen


@pytest.fixture
def limited() -> Any:
    """PyTorch raises where it would otherwise run uncompiled in silence."""
    import torch._dynamo

    config: ConfigModule = torch._dynamo.config
    torch._dynamo.reset()
    with config.patch(fail_on_recompile_limit_hit=True):
        yield torch._dynamo
    torch._dynamo.reset()


def test_eight_replicas_in_two_modes_and_two_shapes_meet_no_limit(limited: Any) -> None:
    sizes = [32, 16, 32, 16]
    expected = trained("dp", "cpu:8", False, sizes)
    actual = trained("dp", "cpu:8", BACKEND, sizes)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    frames = limited.utils.counters["frames"]
    assert frames["ok"] >= 32, frames  # 8 replicas x 2 modes x 2 shapes


def test_one_card_compiles_too(limited: Any) -> None:
    expected = trained("single", "cpu:1", False, [8, 8])
    actual = trained("single", "cpu:1", BACKEND, [8, 8])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert limited.utils.counters["frames"]["ok"] >= 2


@pytest.mark.parametrize("value", ["yes", 3])
def test_compile_takes_true_or_arguments(value: Any) -> None:
    with pytest.raises(SettingError, match="compile"):
        mc.Parallel(strategy="dp", cards="cpu:2", compile=value)
