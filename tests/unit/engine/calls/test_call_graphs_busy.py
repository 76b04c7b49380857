"""Graphs of a module's calls that overlap, fail, are kept or differ: the numbers of eager calls all the same."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manycard as mc
from tests.unit.engine.calls.graphed import (
    Graphed,
    Loop,
    Net,
    Normed,
    adam,
    batches,
    compare,
    losses_of,
    make,
    outcome,
    sgd,
)
from tests.unit.engine.twins import close


def two_forwards(model: Any) -> Any:
    own, losses = sgd(model), []
    for x, labels in batches():
        own.zero_grad()
        loss = F.cross_entropy(model(x), labels) + F.cross_entropy(model(-x), labels)
        loss.backward()
        own.step()
        losses.append(loss.detach())
    return losses


def two_backwards_in_turn(model: Any) -> Any:
    own, losses = sgd(model), []
    for number, (x, labels) in enumerate(batches()):
        own.zero_grad()
        pair = [F.cross_entropy(model(x), labels), F.cross_entropy(model(x * 2), labels)]
        for loss in pair if number % 2 else reversed(pair):
            loss.backward()
        own.step()
        losses.extend(loss.detach() for loss in pair)
    return losses


def forward_without_backward(model: Any) -> Any:
    own, losses = sgd(model), []
    for x, labels in batches():
        kept = model(x)
        losses.append(F.cross_entropy(model(x * 2), labels).detach())
        own.zero_grad()
        loss = F.cross_entropy(model(x * 3), labels)
        loss.backward()
        own.step()
        losses += [loss.detach(), kept.detach()]
        del kept
    return losses


def other_sizes_and_modes(model: Any) -> Any:
    own, losses = sgd(model), []
    for (x, labels), size in zip(batches(18), itertools.cycle([10, 10, 7]), strict=False):
        own.zero_grad()
        y = model(x[:size])
        with torch.no_grad():
            losses.append(model(x * 3))
        model.eval()
        losses.append(model(x[:4]).detach())
        model.train()
        F.cross_entropy(y, labels[:size]).backward()
        own.step()
        losses.append(y.detach())
    return losses


def retained(model: Any) -> Any:
    own, kept = sgd(model), []
    for number, (x, labels) in enumerate(batches(14)):
        own.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        if number % 6 == 5:
            loss.backward(retain_graph=True)
        loss.backward()
        kept.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        own.step()
        del loss
    return kept


def penalised(model: Any) -> Any:
    own, kept = sgd(model), []
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for number, (x, labels) in enumerate(batches(14)):
        own.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        if number in (6, 11):
            gradients = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
            loss = loss + sum(gradient.square().sum() for gradient in gradients if gradient is not None)
        loss.backward()
        kept.append(loss.detach())
        own.step()
        del loss
    return kept


def input_gradients(model: Any) -> Any:
    kept = []
    for number, (x, labels) in enumerate(batches()):
        x.requires_grad_(number % 2 == 1)
        F.cross_entropy(model(x), labels).backward()
        kept.append(x.grad)
    return kept


def freezing(model: Any) -> Any:
    own, kept = sgd(model), []
    first = getattr(model, "module", model).first
    for number, (x, labels) in enumerate(batches(20)):
        own.zero_grad()
        first.requires_grad_(number % 4 < 2)
        y = model(x)
        first.requires_grad_(True)
        F.cross_entropy(y, labels).backward()
        kept.append([parameter.grad is None for parameter in model.parameters()])
        own.step()
    return kept


def hooked(model: Any) -> Any:
    own, seen = sgd(model), []
    weight = getattr(model, "module", model).first.weight
    handle = weight.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 0.5)
    for x, labels in batches():
        own.zero_grad()
        y = model(x)
        y.register_hook(lambda gradient: gradient * 2)
        F.cross_entropy(y, labels).backward()
        own.step()
    handle.remove()
    return seen


@pytest.mark.parametrize("cards", [2, 3])
@pytest.mark.parametrize(
    "loop",
    [
        two_forwards,
        two_backwards_in_turn,
        forward_without_backward,
        other_sizes_and_modes,
        retained,
        penalised,
        input_gradients,
        freezing,
        hooked,
    ],
)
def test_calls_that_overlap_or_differ_give_the_numbers_of_eager_ones(loop: Loop, cards: int) -> None:
    graphed = compare(Net, loop, cards)
    assert graphed.replays > 2
    assert not graphed.reasons
    normed = compare(Normed, loop, cards, alone=False)
    assert normed.replays > 2
    assert not normed.reasons


@pytest.mark.parametrize("loop", [two_forwards, two_backwards_in_turn, forward_without_backward, other_sizes_and_modes])
def test_no_replay_comes_between_the_two_of_a_call(loop: Loop) -> None:
    graphed = compare(Net, loop, 2)
    for recorder in graphed.recorders:
        awaits = None
        for number in recorder.replayed:
            if number % 2 == 0:
                # A forward replay; the one before has had its backward pass, or was dropped by the script.
                assert awaits is None or loop is forward_without_backward
                awaits = number
            else:
                assert awaits == number - 1
                awaits = None


def test_a_graph_is_free_again_when_its_outputs_are_dropped() -> None:
    model, graphed = make(Net, 2, graphs=True)
    assert graphed is not None
    losses_of(model, sgd(model))
    x, labels = next(batches())
    held = model(x)
    before = graphed.replays
    F.cross_entropy(model(x), labels).backward()
    assert graphed.replays == before
    del held
    gc.collect()
    F.cross_entropy(model(x), labels).backward()
    assert graphed.replays == before + 2


def test_a_second_backward_pass_and_changed_parameters_raise_what_pytorch_raises() -> None:
    x, labels = next(batches())

    def raises(model: Any) -> list[bool]:
        losses_of(model, sgd(model))
        module, said = getattr(model, "module", model), []
        for name in ("last.weight", "first.weight", "last.bias", "last.weight"):
            loss = F.cross_entropy(model(x), labels)
            with torch.no_grad():
                module.get_parameter(name).add_(0.0)
            try:
                loss.backward()
                said.append(False)
            except RuntimeError as error:
                said.append("modified by an inplace operation" in str(error))
            del loss
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        assert said == [True, False, False, True]
        return said

    graphed = compare(Net, raises, 2)
    assert graphed.replays > 10


def test_an_exception_on_one_card_leaves_the_next_calls_right() -> None:
    class Failing(Net):
        def forward(self, x: Tensor) -> Any:
            if bool((x > 100).any()):
                raise ValueError("planted")
            return super().forward(x)

    def loop(model: Any) -> list[Tensor]:
        losses = []
        for number, (x, labels) in enumerate(batches()):
            if number in (1, 7):
                odd = x[:9].clone()
                odd[-1] = 1000.0
                with pytest.raises(ValueError, match="planted"):
                    model(odd)
            loss = F.cross_entropy(model(x), labels)
            loss.backward()
            losses.append(loss.detach())
        return losses

    assert compare(Failing, loop, 2).replays > 6


def test_what_a_script_does_to_the_module_between_calls_is_followed() -> None:
    class Scaled(Net):
        factor = 1.0

        def forward(self, x: Tensor) -> Any:
            return super().forward(x) * self.factor

    def loop(model: Any) -> list[Tensor]:
        own, losses, module = sgd(model), [], getattr(model, "module", model)
        for number, (x, labels) in enumerate(batches(24)):
            if number == 8:
                module.factor = 3.0
            if number == 14:
                module.last = copy.deepcopy(module.last)
                own = sgd(model)
            if number == 20:
                module.first.weight.data = module.first.weight.data.clone() * 1.5
            own.zero_grad()
            loss = F.cross_entropy(model(x), labels)
            loss.backward()
            own.step()
            losses.append(loss.detach())
        return losses

    assert compare(Scaled, loop, 2).replays > 16


def test_autocast_is_part_of_a_kind() -> None:
    def loop(model: Any) -> list[Tensor]:
        own, losses = sgd(model), []
        for number, (x, labels) in enumerate(batches(16)):
            own.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=number % 2 == 0):
                y = model(x.float())
            loss = F.cross_entropy(y.float(), labels)
            loss.backward()
            own.step()
            losses += [loss.detach(), y.detach()]
        return losses

    expected = outcome(mc.DataParallel(_seeded().float(), device_ids="cpu:2"), loop)
    model = mc.DataParallel(_seeded().float(), device_ids="cpu:2")
    graphed = Graphed(model)
    torch.testing.assert_close(outcome(model, loop), expected)
    assert graphed.replays > 10
    assert graphed.recorders[0].recordings == 4


def _seeded() -> Net:
    torch.manual_seed(0)
    return Net()


def test_copies_and_pickles_have_graphs_of_their_own() -> None:
    model, graphed = make(Net, 2, graphs=True)
    assert graphed is not None
    losses_of(model, sgd(model))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin._spreader is not model._spreader
        alone = copy.deepcopy(model.module)
        close(losses_of(twin, sgd(twin)), losses_of(alone, sgd(alone)))
    assert losses_of(model, sgd(model))


def test_recording_while_other_calls_await_their_backward_pass_takes_nothing_from_them() -> None:
    def loop(model: Any) -> list[Any]:
        own, kept = sgd(model), []
        wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for x, labels in batches():
            own.zero_grad()
            losses = [F.cross_entropy(model(part), labels[: len(part)]) for part in (x, x[:7], x * 2, x[:7] * 2)]
            for loss in losses:
                gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
                kept.append(gradients)
                for parameter, gradient in zip(wanted, gradients, strict=True):
                    if gradient is not None:
                        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            own.step()
        return kept

    assert compare(Net, loop, 2).replays > 4


def test_recurrent_and_tied_weights_are_replayed() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(6, 6, batch_first=True)
            self.again = nn.GRU(6, 6, batch_first=True)
            self.again.weight_hh_l0 = self.rnn.weight_hh_l0
            self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.again(self.rnn(x.unsqueeze(1))[0])[0].squeeze(1))

    graphed = compare(Recurrent, lambda model: losses_of(model, adam(model)), 2)
    assert graphed.replays > 8
    assert not graphed.reasons
