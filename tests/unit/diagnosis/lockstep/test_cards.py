"""`check_lockstep` and `check_every` on the cards of one process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import manycard as mc
from manycard.engine.data_parallel import DataParallel
from manycard.errors import LockstepError, ModelError, SettingError
from manycard.strategies.train_step import TrainStep


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.fixture
def run() -> Iterator[tuple[mc.Parallel, DataParallel, TrainStep]]:
    parallel = mc.Parallel("dp", cards="cpu:3", seed=0, check_every=5)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model, optimizer = parallel.setup(net, torch.optim.AdamW(net.parameters()))
    yield parallel, model, parallel.train_step(loss_fn, model, optimizer)
    parallel.close()


def test_nothing_is_said_of_cards_in_lockstep(run: tuple[mc.Parallel, DataParallel, TrainStep]) -> None:
    parallel, model, step = run
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(11):
            step(torch.randn(9, 4))
    report = parallel.check_lockstep(model)
    assert report.equal
    assert report.findings == ()
    assert str(report).startswith("cpu:0, cpu:1, cpu:2 are in lockstep: 6 parameters")


def test_a_parameter_that_one_card_has_otherwise_is_named(run: tuple[mc.Parallel, DataParallel, TrainStep]) -> None:
    _, model, step = run
    step(torch.randn(9, 4))
    with torch.no_grad():
        model.engine.replicas.parameters[1][4][0, 3] += 1e-7
    with pytest.raises(LockstepError, match=r"parameters differ between cards: 2\.weight \(2\.weight on cpu:1\)"):
        mc.check_lockstep(model)


def test_the_step_is_named_since_which_cards_are_apart(run: tuple[mc.Parallel, DataParallel, TrainStep]) -> None:
    _, model, step = run
    for _ in range(6):
        step(torch.randn(9, 4))

    mirrors = next(iter(model.engine.updates.mirrored.values()))
    step(torch.randn(9, 4))
    mirrors._copies[1].step = lambda: None  # type: ignore[method-assign]
    model.engine._guard.drifted = lambda parameters: False  # type: ignore[method-assign]
    for _ in range(2):
        step(torch.randn(9, 4))
    with pytest.raises(LockstepError, match=r"on cpu:2, after step 10 and not yet after step 5"):
        step(torch.randn(9, 4))


def test_the_card_whose_loss_was_nan_first_is_named(run: tuple[mc.Parallel, DataParallel, TrainStep]) -> None:
    _, _, step = run
    for number in range(9):
        x = torch.randn(9, 4)
        if number == 7:
            x[4, 1] = float("nan")
        step(x)
    with pytest.warns(UserWarning, match=r"inf or NaN on all cards .* first in the loss of cpu:1 alone, in 2 steps"):
        step(torch.randn(9, 4))


def test_the_loop_written_out_is_followed() -> None:
    parallel = mc.Parallel("single", cards="cpu:1", check_every=3)
    net = nn.Linear(2, 1)
    model, optimizer = parallel.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def update(value: float) -> None:
        parallel.backward(model(torch.full((4, 2), value)).mean())
        optimizer.step()

    update(1.0)
    update(float("nan"))
    with pytest.warns(UserWarning, match=r"inf or NaN \(parameter weight.*after step 3 and not yet after step 1"):
        update(1.0)
    parallel.close()


def test_a_model_on_one_card_has_nothing_to_compare() -> None:
    assert str(mc.check_lockstep(nn.Linear(2, 1))).startswith("nothing to compare")


def test_wrong_settings() -> None:
    with pytest.raises(SettingError, match=r"check_every=0: .*check_every=100"):
        mc.Parallel("single", cards="cpu:1", check_every=0)
    with pytest.raises(ModelError, match="a function is no module"):
        mc.check_lockstep(loss_fn)  # type: ignore[arg-type]
