"""`mc.DataParallel` in ordinary loops: any optimizer, any loop, equal to one card."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.strategies.cases import CASES
from tests.strategies.models import Net

from .twins import CARDS, batch, close, ordinary_loop, same_state, twins

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "fused adamw": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "foreach adam": partial(torch.optim.Adam, lr=1e-2, foreach=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "rprop": partial(torch.optim.Rprop, lr=1e-2),
}


@pytest.mark.parametrize("cards", CARDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_ordinary_loop(name: str, cards: int) -> None:
    alone, together = twins(Net, cards)
    batches = [batch(size, seed=step) for step, size in enumerate((12, 7, 2, 1, 12))]
    mine, theirs = (ordinary_loop(model, OPTIMIZERS[name](model.parameters()), batches) for model in (alone, together))
    close(theirs, mine)
    same_state(alone, together)


@pytest.mark.parametrize("cards", CARDS)
def test_lbfgs_evaluates_its_closure_as_often(cards: int) -> None:
    """Report kind closure-optimizer."""
    alone, together = twins(Net, cards)
    x = batch(10)
    calls: dict[int, int] = {}
    for model in (alone, together):
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, line_search_fn="strong_wolfe")

        def closure(model: Any = model, optimizer: Any = optimizer) -> Tensor:
            calls[id(model)] = calls.get(id(model), 0) + 1
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x[:, :3])
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
    assert calls[id(alone)] == calls[id(together)]
    for mine, theirs in zip(alone.parameters(), together.module.parameters(), strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cards", CARDS)
def test_accumulation_with_clipping_and_a_schedule(cards: int) -> None:
    alone, together = twins(Net, cards)
    for model in (alone, together):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        for step in range(8):
            x = batch(5 + step, seed=step)
            (F.mse_loss(model(x), x[:, :3]) / 4).backward()
            if step % 4 == 3:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                scheduler.step()
                if step == 3:
                    optimizer.zero_grad()
    same_state(alone, together)


CALLED = [case for case in CASES if case.in_explicit_loop and not case.options]


def _critic() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("cards", [2, 3])
def test_a_gan_loop_with_two_forwards_before_one_backward(cards: int) -> None:
    """Report kinds ddp-double-forward, set-epoch: forwards pile up, and parameters are switched off and on."""
    (mine, generator), (other, critic) = twins(Net, cards), twins(_critic, cards)
    for first, second in ((mine, other), (generator, critic)):
        one = torch.optim.SGD(first.parameters(), lr=0.05, momentum=0.9)
        two = torch.optim.Adam(second.parameters(), lr=1e-2)
        for step in range(4):
            noise, real = batch(7, seed=step), batch(5, 3, seed=10 + step)
            two.zero_grad()
            fake = first(noise)
            loss = F.softplus(-second(real)).mean() + F.softplus(second(fake.detach())).mean()
            loss.backward()
            two.step()
            for parameter in second.parameters():
                parameter.requires_grad_(False)
            one.zero_grad()
            F.softplus(-second(fake)).mean().backward()
            one.step()
            for parameter in second.parameters():
                parameter.requires_grad_(True)
    same_state(mine, generator)
    same_state(other, critic)


def test_kept_outputs_do_not_hold_back_later_steps() -> None:
    """Losses that are kept with their graphs, as loops that forget `.item()` do, await a backward for ever."""
    alone, together = twins(Net)
    kept: list[list[Tensor]] = [[], []]
    for losses, model in zip(kept, (alone, together), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            x = batch(6, seed=step)
            losses.append(model(x).square().mean())  # never sent backward
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x[:, :3])
            loss.backward()
            optimizer.step()
            losses.append(loss)
    close(kept[1], kept[0])
    same_state(alone, together)


def test_a_loss_over_the_whole_batch_is_exact_outside() -> None:
    """Report kind dp-contrastive: negatives are the whole batch, as outputs are gathered."""
    alone, together = twins(Net)
    x = batch(8)
    for model in (alone, together):
        embeddings = F.normalize(model(x), dim=1)
        F.cross_entropy(embeddings @ embeddings.t() / 0.1, torch.arange(8)).backward()
    same_state(alone, together)


@pytest.mark.parametrize("cards", [2, 4])
@pytest.mark.parametrize("case", CALLED, ids=lambda case: case.name)
def test_the_strategies_cases_in_one_plain_loop(case: Any, cards: int) -> None:
    """The loss is computed outside, by the caller, so every case that calls the module fits."""
    torch.manual_seed(7)
    alone, together = twins(case.make_model, cards)
    samples = case.make_samples(case.samples)
    for model in (alone, together):
        optimizers = case.make_optimizers(getattr(model, "module", model))
        for value in torch.utils.data.DataLoader(samples, case.batch_size):
            loss = case.loss_fn(model, _double(value))
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    same_state(alone, together)


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _double(part) for key, part in value.items()}
    return type(value)(_double(part) for part in value)
