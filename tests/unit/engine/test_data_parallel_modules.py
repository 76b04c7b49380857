"""Modules that copying and threads make hard: made right by `mc.DataParallel`."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import manycard as mc
from tests.strategies.models import Net, OddParameters, SparseWords, TiedWords

from .twins import CARDS, batch, close, spread, train, twins


def _old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3))


def _old_spectral_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3))


def _parametrized(name: str) -> nn.Module:
    net = Net()
    getattr(parametrizations, name)(net.body[0])
    return net


class Doubled(nn.Module):
    """A parametrization of the user's own."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def _own_parametrization() -> nn.Module:
    net = Net()
    parametrize.register_parametrization(net.head, "weight", Doubled())
    return net


def _pruned() -> nn.Module:
    from torch.nn.utils import prune

    net = Net()
    prune.l1_unstructured(net.head, "weight", 0.5)
    return net


REPARAMETRIZED = {
    "weight_norm": lambda: _parametrized("weight_norm"),
    "weight_norm, old": _old_weight_norm,
    "spectral_norm": lambda: _parametrized("spectral_norm"),
    "spectral_norm, old": _old_spectral_norm,
    "orthogonal": lambda: _parametrized("orthogonal"),
    "one's own": _own_parametrization,
    "pruned": _pruned,
}


@pytest.mark.parametrize("cards", [2, 3])
@pytest.mark.parametrize("name", REPARAMETRIZED)
def test_reparametrized_weights_train(name: str, cards: int) -> None:
    """Report kind dp-reparam."""
    train(*twins(REPARAMETRIZED[name], cards))


@pytest.mark.parametrize("cards", CARDS)
def test_lazy_modules_are_initialised_once_on_the_primary(cards: int) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))

    results = []
    for wrap in (lambda module: module, lambda module: spread(module, cards)):
        model = wrap(make().double())
        torch.manual_seed(0)
        y = model(batch(7))
        y.square().mean().backward()
        results.append([y.detach(), *[p.grad for p in model.parameters()], *[p.detach() for p in model.parameters()]])
    close(results[1], results[0])


class Recurrent(nn.Module):
    """Two layers of LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(3, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out, _ = self.cell(x.view(len(x), 2, 3))
        return self.head(out[:, -1])


def test_an_lstm_trains_without_warnings() -> None:
    """Report kind dp-rnn."""
    train(*twins(Recurrent))


class CopiesItself(Net):
    """Meta-learning: works on a copy of its parts."""

    def forward(self, x: Tensor) -> Tensor:
        body = copy.deepcopy(self.body)
        with torch.enable_grad():
            loss = self.head(body(x.detach())).square().mean() * 0
            inner = torch.autograd.grad(loss, list(body.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(body.parameters(), inner, strict=True):
                parameter -= grad
        return self.head(self.body(x)) + self.head(body(x)).detach()


def test_deepcopy_in_forward() -> None:
    """Report kind dp-deepcopy."""
    train(*twins(CopiesItself))


class AsksItsParameters(Net):
    """Looks at its own parameters, as older models do for their dtype."""

    def forward(self, x: Tensor) -> Tensor:
        first = next(self.parameters())
        assert first.is_leaf
        assert isinstance(first, nn.Parameter)
        assert len(list(self.named_parameters())) == 6
        return super().forward(x.to(first.dtype)) + 1e-2 * sum(p.square().sum() for p in self.parameters())


def test_parameters_are_there_in_forward() -> None:
    """Report kind dp-params-empty."""
    train(*twins(AsksItsParameters))


class Ids(nn.Module):
    """Numbers to rows of words."""

    def __init__(self, words: nn.Module) -> None:
        super().__init__()
        self.words = words

    def forward(self, x: Tensor) -> Tensor:
        return self.words((x.abs() * 3).long() % 11).mean(1)


@pytest.mark.parametrize("make", [OddParameters, lambda: Ids(TiedWords()), lambda: Ids(SparseWords())])
def test_odd_tied_and_sparse_parameters(make: Any) -> None:
    alone, together = twins(make)
    for model in (alone, together):
        model(batch(7)).square().mean().backward()
    for mine, theirs in zip(alone.parameters(), together.module.parameters(), strict=True):
        assert mine.grad is None or mine.grad.is_sparse == theirs.grad.is_sparse
        close(_dense(theirs.grad), _dense(mine.grad))


def _dense(grad: Tensor | None) -> Tensor | None:
    return grad.to_dense() if grad is not None and grad.is_sparse else grad


class Outer(nn.Module):
    """A module that wraps one of its own parts."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6).double()
        self.inner = wrap(Net().double())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.before(x)))


@pytest.mark.timeout(30)
def test_a_wrapper_inside_a_wrapper() -> None:
    torch.manual_seed(0)
    alone = Outer(lambda module: module)
    torch.manual_seed(0)
    together = spread(Outer(lambda module: spread(module, 2)))
    for step in range(2):
        outs = [model(batch(7, seed=step)) for model in (alone, together)]
        close(outs[1], outs[0])
        for out in outs:
            out.square().mean().backward()
    for mine, theirs in zip(alone.parameters(), together.module.parameters(), strict=True):
        close(theirs.grad, mine.grad)


@pytest.mark.timeout(30)
def test_a_wrapper_as_a_part_of_a_plain_module() -> None:
    torch.manual_seed(0)
    alone = Outer(lambda module: module)
    torch.manual_seed(0)
    together = Outer(spread)
    for model in (alone, together):
        model(batch(7)).square().mean().backward()
    for mine, theirs in zip(alone.parameters(), together.parameters(), strict=True):
        close(theirs.grad, mine.grad)


def test_a_compiled_module_trains() -> None:
    torch.manual_seed(0)
    alone = Net().double()
    inside = copy.deepcopy(alone)
    compiled = torch.compile(inside, backend="eager")
    train(alone, _unwrapped_view(spread(compiled)))


class _View:
    """Calls the wrapper; names parameters as the uncompiled module does."""

    def __init__(self, together: Any) -> None:
        self.call = together
        self.module = together.module._orig_mod

    def __call__(self, x: Tensor) -> Tensor:
        return self.call(x)

    def parameters(self) -> Any:
        return self.call.parameters()


def _unwrapped_view(together: Any) -> _View:
    return _View(together)


def test_a_module_without_parameters() -> None:
    close(spread(nn.Tanh())(batch(7)), batch(7).tanh())
    x = batch(7).requires_grad_()
    spread(nn.Tanh())(x).sum().backward()
    close(x.grad, 1 - batch(7).tanh() ** 2)


def test_batchnorm_keeps_the_primarys_statistics() -> None:
    """Report kind dp-bn-stats: per shard in training, of which the primary's stay."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6).double()
    alone, together = copy.deepcopy(norm), spread(norm)
    for step in range(3):
        x = batch(9, seed=step)
        alone(x[:3])
        together(x)
    close(together.module.running_mean, alone.running_mean)
    close(together.module.running_var, alone.running_var)
    assert int(together.module.num_batches_tracked) == 3
    together.eval()
    alone.eval()
    close(together(batch(9)), alone(batch(9)))


def test_the_drop_in_takes_what_the_original_takes() -> None:
    import inspect

    ours = list(inspect.signature(mc.DataParallel).parameters)
    assert (
        ours[:4]
        == list(inspect.signature(nn.DataParallel).parameters)[:4]
        == ["module", "device_ids", "output_device", "dim"]
    )
