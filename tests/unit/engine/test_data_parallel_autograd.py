"""The place of `mc.DataParallel` in autograd: hooks, graphs and second derivatives equal to one card's to 1e-9."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.strategies.models import Dropped, Net

from .twins import CARDS, batch, close, grads, same_state, twins


def test_hooks_on_parameters_see_the_whole_gradient_once() -> None:
    alone, together = twins(Net)
    seen: list[list[Tensor]] = [[], []]
    for calls, model in zip(seen, (alone, together), strict=True):
        for parameter in model.parameters():
            parameter.register_hook(lambda grad, calls=calls: calls.append(grad.clone()) or grad * 0.5)
        F.mse_loss(model(batch(7)), batch(7, 3)).backward()
    close(sorted(seen[1], key=_order), sorted(seen[0], key=_order))
    same_state(alone, together)


def _order(tensor: Tensor) -> tuple[int, float]:
    return tensor.numel(), float(tensor.flatten()[0])


def test_an_optimizer_in_post_accumulate_grad_hooks() -> None:
    alone, together = twins(Net)
    for model in (alone, together):
        calls = []

        def update(parameter: Tensor, calls: list[Tensor] = calls) -> None:
            calls.append(parameter)
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for step in range(3):
            F.mse_loss(model(batch(7, seed=step)), batch(7, 3)).backward()
        assert len(calls) == 3 * len(list(model.parameters()))
    same_state(alone, together)


def test_forward_hooks_on_parts_act_on_every_card() -> None:
    alone, together = twins(Net)
    for model in (alone, together):
        module = getattr(model, "module", model)
        module.body[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        module.body[0].register_forward_hook(lambda module, args, out: out * 3)
        module.head.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 0.5,))
        F.mse_loss(model(batch(7)), batch(7, 3)).backward()
    same_state(alone, together)


def test_hooks_set_between_two_forwards_act_and_removed_ones_do_not() -> None:
    alone, together = twins(Net)
    close(together(batch(7)), alone(batch(7)))
    handles = []
    for model in (alone, together):
        module = getattr(model, "module", model)
        handles.append(module.body[0].register_forward_hook(lambda module, args, out: out * 3))
    close(together(batch(7)), alone(batch(7)))
    for handle in handles:
        handle.remove()
    close(together(batch(7)), alone(batch(7)))


class HooksInForward(Net):
    """Registers a hook, runs, removes it."""

    calls: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        handle = self.body[0].register_forward_hook(lambda module, args, out: kept.append(out))
        y = super().forward(x)
        handle.remove()
        HooksInForward.calls.append(len(kept))
        return y + kept[0][:, :3]


def test_hooks_made_and_removed_in_forward_fire_once_each() -> None:
    """Report kind dp-hooks."""
    alone, together = twins(HooksInForward)
    HooksInForward.calls.clear()
    for _ in range(2):
        close(together(batch(7)), alone(batch(7)))
    assert set(HooksInForward.calls) == {1}
    assert not together.module.body[0]._forward_hooks


def test_hooks_on_the_wrapper_see_the_whole_batch() -> None:
    _, together = twins(Net)
    seen = []
    together.register_forward_hook(lambda module, args, out: seen.append((args[0].shape, out.shape)))
    together(batch(7))
    assert seen == [((7, 6), (7, 3))]


@pytest.mark.parametrize("cards", CARDS)
def test_two_backwards_through_one_forward(cards: int) -> None:
    alone, together = twins(Net, cards)
    for model in (alone, together):
        y = model(batch(7))
        y.square().mean().backward(retain_graph=True)
        y.sin().mean().backward()
    same_state(alone, together)


def test_a_graph_that_was_not_retained_says_so() -> None:
    _, together = twins(Net)
    loss = together(batch(7)).square().mean()
    loss.backward()
    before = grads(together.parameters())
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    close(grads(together.parameters()), before)


def test_outputs_that_go_backward_separately() -> None:
    class Heads(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            hidden = self.body(x)
            return self.head(hidden), hidden, x.argmax(1)

    alone, together = twins(Heads)
    for model in (alone, together):
        first, second, index = model(batch(7))
        assert not index.requires_grad
        first.square().mean().backward(retain_graph=True)
        second[:2].sum().backward()
    same_state(alone, together)


def test_gradients_of_two_forwards_in_one_backward() -> None:
    alone, together = twins(Net)
    for model in (alone, together):
        (model(batch(7)).square().mean() * model(batch(4)).mean()).backward()
    same_state(alone, together)


@pytest.mark.parametrize("cards", CARDS)
def test_autograd_grad_of_parameters_and_inputs(cards: int) -> None:
    """Report kind dp-attribute: gradients taken by hand are whole as well."""
    alone, together = twins(Net, cards)
    results = []
    for model in (alone, together):
        x = batch(7).requires_grad_()
        loss = F.mse_loss(model(x), batch(7, 3))
        results.append(torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True))
        results[-1] += torch.autograd.grad(loss, [next(iter(model.parameters()))])
        assert all(parameter.grad is None for parameter in model.parameters())
    close(results[1], results[0])


@pytest.mark.parametrize("cards", CARDS)
def test_input_gradients_through_modules_before_it(cards: int) -> None:
    alone, together = twins(Net, cards)
    for before in (nn.Linear(6, 6).double(),):
        weights = []
        for model in (alone, together):
            before.zero_grad()
            x = batch(7).requires_grad_()
            F.mse_loss(model(torch.tanh(before(x))), batch(7, 3)).backward()
            weights.append([x.grad.clone(), *grads(before.parameters())])
        close(weights[1], weights[0])
    same_state(alone, together)


@pytest.mark.parametrize("cards", CARDS)
def test_a_gradient_penalty(cards: int) -> None:
    """Report kinds double-backward, silent-wrong-grad, silent-unsync."""
    alone, together = twins(Net, cards)
    for model in (alone, together):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(3):
            x = batch(7, seed=step).requires_grad_()
            y = model(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            optimizer.zero_grad()
            (y.mean() + 10 * penalty).backward()
            optimizer.step()
    same_state(alone, together)


@pytest.mark.parametrize("cards", [2, 3])
def test_second_derivatives_of_parameters(cards: int) -> None:
    """A meta-learning step: the gradient of a loss after a gradient step."""
    alone, together = twins(Net, cards)
    for model in (alone, together):
        parameters = list(model.parameters())
        inner = torch.autograd.grad(F.mse_loss(model(batch(7)), batch(7, 3)), parameters, create_graph=True)
        sum(grad.square().sum() for grad in inner).backward()
    same_state(alone, together)


def test_a_third_derivative() -> None:
    alone, together = twins(Net)
    results = []
    for model in (alone, together):
        x = batch(5).requires_grad_()
        value = model(x).sum()
        for _ in range(3):
            (slope,) = torch.autograd.grad(value, x, create_graph=True)
            value = slope.square().sum()
        results.append(value.detach())
    close(results[1], results[0])


def test_create_graph_draws_the_same_dropout_as_the_forward() -> None:
    """A backward that computes the forward again must draw what the forward drew."""
    torch.manual_seed(0)
    _, together = twins(Dropped)
    x = batch(6).requires_grad_()
    torch.manual_seed(3)
    y = together(x)
    plain = torch.autograd.grad(y.sum(), x, retain_graph=True)
    again = torch.autograd.grad(y.sum(), x, create_graph=True)
    close(again[0].detach(), plain[0])


def test_create_graph_counts_each_forward_once() -> None:
    """The graph of a gradient may take a second look at forward; what forward writes must not show it."""

    class Counts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.norm = nn.BatchNorm1d(8)
            self.register_buffer("again", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.again = self.again + 1
            return self.head(self.norm(self.body(x)))

    _, together = twins(Counts)
    for _ in range(3):
        x = batch(6).requires_grad_()
        (slope,) = torch.autograd.grad(together(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
    assert together.module.calls == 3
    assert int(together.module.again) == 3
    assert int(together.module.norm.num_batches_tracked) == 3


def test_parameters_frozen_between_forward_and_backward() -> None:
    """GAN loops freeze the critic at any time; the graph that is there goes backward as on one card."""
    alone, together = twins(Net)
    results = []
    for model in (alone, together):
        x = batch(7).requires_grad_()
        first, second = model(x).square().mean(), model(x).sum()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        first.backward()
        results.append([x.grad, *torch.autograd.grad(second, x, create_graph=True)])
        for parameter in model.parameters():
            parameter.requires_grad_(True)
    close(results[1], results[0])
    same_state(alone, together)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints_in_forward(reentrant: bool) -> None:
    """Report kind ckpt-twice-ready."""

    class Again(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.body, x * 1.0, use_reentrant=reentrant))

    alone, together = twins(Again)
    for model in (alone, together):
        x = batch(7).requires_grad_()
        F.mse_loss(model(x), batch(7, 3)).backward()
    same_state(alone, together)


def test_backward_inside_forward() -> None:
    """Energy models differentiate inside forward."""

    class Force(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = super().forward(x).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

    alone, together = twins(Force)
    for model in (alone, together):
        model(batch(7)).square().mean().backward()
    same_state(alone, together)


def test_an_unused_parameter_gets_no_gradient_and_a_frozen_one_neither() -> None:
    class Half(Net):
        def __init__(self) -> None:
            super().__init__()
            self.never = nn.Linear(2, 2)
            self.body[0].requires_grad_(False)

    alone, together = twins(Half)
    for model in (alone, together):
        model(batch(7)).square().mean().backward()
    assert together.module.never.weight.grad is None
    same_state(alone, together)


def test_outputs_without_gradient() -> None:
    _, together = twins(Net)
    for parameter in together.parameters():
        parameter.requires_grad_(False)
    assert not together(batch(7)).requires_grad
    with torch.no_grad():
        assert not together(batch(7).requires_grad_()).requires_grad


def test_an_output_that_is_an_input() -> None:
    class Through(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, self.line(x)

    alone, together = twins(Through)
    results = []
    for model in (alone, together):
        x = batch(7).requires_grad_()
        same, y = model(x)
        (same * y).sum().backward()
        results.append(x.grad)
    close(results[1], results[0])
    same_state(alone, together)


def test_an_anomaly_is_reported_as_on_one_card() -> None:
    class Nan(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sub(1e6).sqrt()

    _, together = twins(Nan)
    with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="nan"):
        together(batch(7)).sum().backward()
