"""`check_lockstep` and `check_every` on real cards, as many as there are."""

from __future__ import annotations

import time
import warnings

import pytest
import torch
from torch import nn

import manycard as mc
from manycard.diagnosis.lockstep.check import compare
from manycard.errors import LockstepError

COUNTS = [count for count in (1, 2, 4, 8) if count <= max(torch.cuda.device_count(), 1)]
SEVERAL = [count for count in COUNTS if count > 1]


def made(count: int, **options: object) -> tuple[mc.Parallel, nn.Module, object]:
    parallel = mc.Parallel("dp", cards=count, seed=0, **options)  # type: ignore[arg-type]
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    net(torch.zeros(2, 3, 16, 16))
    model, optimizer = parallel.setup(net, torch.optim.AdamW(net.parameters()))
    step = parallel.train_step(lambda model, x: model(x).square().mean(), model, optimizer)
    return parallel, model, step


@pytest.mark.parametrize("count", COUNTS)
def test_cards_in_lockstep_with_graphs_and_without(count: int) -> None:
    parallel, model, step = made(count, check_every=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):
            step(torch.randn(8 * count, 3, 16, 16))  # type: ignore[operator]
    assert parallel.check_lockstep(model).equal
    parallel.close()


@pytest.mark.parametrize("count", SEVERAL)
def test_the_card_that_differs_is_named(count: int) -> None:
    parallel, model, step = made(count)
    for _ in range(3):
        step(torch.randn(8 * count, 3, 16, 16))  # type: ignore[operator]
    last = count - 1
    with torch.no_grad():
        model.engine.replicas.parameters[last][0][0, 0, 0, 0] += 1  # type: ignore[union-attr]
    with pytest.raises(LockstepError, match=rf"0\.weight on cuda:{last}"):
        parallel.check_lockstep(model)
    parallel.close()


@pytest.mark.parametrize("count", SEVERAL)
def test_a_comparison_costs_under_a_hundredth_of_100_steps(count: int) -> None:
    parallel = mc.Parallel("dp", cards=count, seed=0)
    net = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(2048, 2048), nn.GELU())))
    model, optimizer = parallel.setup(net, torch.optim.AdamW(net.parameters()))
    step = parallel.train_step(lambda model, x: model(x).square().mean(), model, optimizer)
    batch = torch.randn(4096 * count, 2048, device=parallel.device)

    def wait() -> float:
        for card in parallel.cards:
            torch.cuda.synchronize(card.device)
        return time.perf_counter()

    for _ in range(20):
        step(batch)
    compare(model, updated=True)
    begin = wait()
    for _ in range(20):
        step(batch)
    middle = wait()
    compare(model, updated=True, buffers=False)
    of_a_step, comparison = (middle - begin) / 20, wait() - middle
    parallel.close()
    assert comparison < 0.01 * 100 * of_a_step, f"{1e3 * comparison:.1f} ms beside steps of {1e3 * of_a_step:.2f} ms"
