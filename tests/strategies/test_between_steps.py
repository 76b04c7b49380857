"""What a script does between steps, around groups of micro-batches and with several objects at once, in `dp`."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manycard as mc
from manycard.errors import ModelError, OptimizerError, SettingError


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def loss_fn(model: Any, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def batch(samples: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 3, generator=generator), torch.randn(samples, 2, generator=generator)


def squared_error(model: Any, batch: Any) -> dict[str, tuple[Any, int]]:
    return {"error": ((model(batch[0]) - batch[1]).square().sum(), batch[1].numel())}


class Run:
    """One model under `dp` on three simulated cards."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        self.module = model
        self.parallel = mc.Parallel("dp", cards="cpu:3", **settings)
        self.model, self.optimizer = self.parallel.setup(model, torch.optim.SGD(model.parameters(), 0.1))
        self.step = self.parallel.train_step(loss_fn, self.model, self.optimizer)


def plain_step(model: nn.Module, data: Any) -> None:
    model.zero_grad()
    loss_fn(model, data).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


def same(one: nn.Module, other: nn.Module) -> None:
    for expected, actual in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_evaluation_sees_weights_however_they_were_written() -> None:
    run = Run(net())
    run.step(batch())
    for parameter in run.module.parameters():
        parameter.data.mul_(0.5)
    loader = run.parallel.loader(torch.utils.data.TensorDataset(*batch(10)), batch_size=5)
    found = run.parallel.evaluate(squared_error, run.model, loader)["error"]
    x, y = batch(10)
    assert found == pytest.approx((run.module(x) - y).square().mean().item(), rel=1e-9)
    run.parallel.close()


def test_a_fused_step_of_the_scripts_own_reaches_all_cards() -> None:
    model = net()
    alone = copy.deepcopy(model)
    parallel = mc.Parallel("dp", cards="cpu:3")
    spread, optimizer = parallel.setup(model, torch.optim.Adam(model.parameters(), 0.1, fused=True))
    own = torch.optim.Adam(alone.parameters(), 0.1, fused=True)
    step = parallel.train_step(loss_fn, spread, optimizer)
    for number in range(4):
        if number % 2:
            step(batch(7, number))
        else:
            optimizer.zero_grad()
            parallel.backward(loss_fn(spread, batch(7, number)))
            optimizer.step()
        own.zero_grad()
        loss_fn(alone, batch(7, number)).backward()
        own.step()
    same(alone, model)
    parallel.check_lockstep(spread)
    parallel.close()


def test_work_after_close_goes_on() -> None:
    run = Run(net())
    alone = copy.deepcopy(run.module)
    run.step(batch())
    run.parallel.close()
    run.step(batch())
    assert run.model(batch()[0]).shape == (8, 2)
    for _ in range(2):
        plain_step(alone, batch())
    same(alone, run.module)
    run.parallel.close()


def test_the_first_group_drops_gradients_that_were_there() -> None:
    model = net()
    alone = copy.deepcopy(model)
    model(batch()[0]).sum().backward()
    run = Run(model)
    run.step(batch())
    plain_step(alone, batch())
    same(alone, model)
    run.parallel.close()


def test_two_open_groups_of_one_model_are_refused() -> None:
    run = Run(net(), accumulate=2)
    other = run.parallel.train_step(loss_fn, run.model, run.optimizer)
    run.step(batch())
    with pytest.raises(OptimizerError, match="1 micro-batches"):
        other(batch())
    run.parallel.close()


def test_dropping_gradients_inside_a_group_is_refused() -> None:
    run = Run(net(), accumulate=2)
    run.step(batch())
    run.optimizer.zero_grad()
    with pytest.raises(ModelError, match="zero_grad"):
        run.step(batch())
    run.parallel.close()


def test_the_epochs_end_counts_for_its_own_batch_only() -> None:
    run = Run(net(), accumulate=2)
    updates = []
    for x, y in run.parallel.loader(torch.utils.data.TensorDataset(*batch(16)), batch_size=8):
        for part in zip(x.chunk(2), y.chunk(2), strict=True):
            run.step(part)
            updates.append(run.step.updated)
    assert updates == [False, True, False, True]
    run.parallel.close()


def test_one_loss_scale_serves_a_whole_group() -> None:
    torch.set_default_dtype(torch.float32)
    parallel = mc.Parallel("dp", cards="cpu:2", precision="fp16", accumulate=2)
    steps = []
    for _ in range(2):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        spread, optimizer = parallel.setup(model, torch.optim.SGD(model.parameters(), 1.0))
        steps.append((model, parallel.train_step(lambda m, x: m(x).mean(), spread, optimizer)))
    (_, overflowing), (model, steady) = steps
    for _ in range(2):
        overflowing(torch.full((2, 1), 6e4))
        steady(torch.full((2, 1), 0.25))
    assert steady.updated
    assert model.weight.item() == pytest.approx(0.75, abs=1e-3)
    parallel.close()


def test_replicas_made_in_inference_mode_can_be_trained() -> None:
    model = mc.DataParallel(net(), device_ids="cpu:3")
    with torch.inference_mode():
        model(batch()[0])
    loss_fn(model, batch()).backward()
    alone = copy.deepcopy(model.module)
    alone.zero_grad()
    loss_fn(alone, batch()).backward()
    for expected, actual in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-9, atol=1e-9)


def test_schedulers_that_a_step_can_not_call_are_refused() -> None:
    run = Run(net())
    for scheduler in (torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer), [1]):
        with pytest.raises(SettingError, match="scheduler"):
            run.parallel.train_step(loss_fn, run.model, run.optimizer, scheduler=scheduler)
    run.parallel.close()


def test_parameters_outside_the_model_are_refused_when_they_come_later() -> None:
    run = Run(net())
    run.step(batch())
    run.optimizer.add_param_group({"params": list(nn.Linear(2, 2).parameters())})
    with pytest.raises(OptimizerError, match="not the model's"):
        run.step(batch())
    run.parallel.close()


def test_optimizers_and_models_that_are_dropped_are_freed() -> None:
    run = Run(net())
    seen = []
    for _ in range(3):
        optimizer = torch.optim.Adam(run.module.parameters())
        run.parallel.train_step(loss_fn, run.model, optimizer)(batch())
        seen.append(weakref.ref(optimizer))
        other = run.parallel.setup(net())
        other(batch()[0])
        seen.append(weakref.ref(other))
        del optimizer, other
    gc.collect()
    assert [ref() for ref in seen] == [None] * 6
    run.parallel.close()


class Held(nn.Module):
    """Looks things up in forward that a script may edit in place."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(4)
        self.active = {1, 2}
        self.parts = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        self.scales = {"a": 1.0, "b": 2.0}

    def forward(self, x: Tensor) -> Tensor:
        return self.parts["a"](x * self.mask) * self.scales["a"] + self.parts["b"](x) * len(self.active)


EDITS = {
    "tensor": lambda m: m.mask.__setitem__(0, 7.0),
    "set": lambda m: m.active.add(3),
    "keys": lambda m: m.scales.update(a=m.scales["b"], b=m.scales["a"]),
    "modules swapped": lambda m: m.parts.update({"a": m.parts["b"], "b": m.parts["a"]}),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edits_in_place_reach_the_replicas(edit: str) -> None:
    model = mc.DataParallel(Held(), device_ids="cpu:3")
    x = torch.randn(6, 4)
    model(x)
    EDITS[edit](model.module)
    torch.testing.assert_close(model(x), model.module(x), rtol=1e-9, atol=1e-9)


def test_writes_that_keep_the_norm_are_noticed() -> None:
    run = Run(net())
    alone = copy.deepcopy(run.module)
    for number in range(3):
        for model in (alone, run.module):
            model[0].weight.data.neg_()
        plain_step(alone, batch(7, number))
        run.step(batch(7, number))
    same(alone, run.module)
    run.parallel.close()
