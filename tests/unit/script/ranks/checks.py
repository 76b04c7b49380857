"""What is checked in ranks, each against plain PyTorch in the same process: what calls give."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manycard.script.calls import Interception
from manycard.script.ranks.spreading import RankSpreading
from manycard.strategies.peers import Peers

__all__ = ["CHECKS", "Rank", "Sometimes", "both", "check", "close", "mlp"]


@dataclass
class Rank:
    """One rank, in which outermost calls are spread."""

    rank: int
    world: int
    calls: Interception
    spreading: RankSpreading
    peers: Peers

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Calls run as they are made."""
        self.calls.active = False
        try:
            yield
        finally:
            self.calls.active = True

    def spread(self) -> int:
        """How many calls were spread."""
        return sum(report.spread for report in self.spreading.reports)

    def reasons(self) -> list[str]:
        """Why calls were not spread."""
        return [reason for report in self.spreading.reports for reason in report.reasons]

    def same_everywhere(self, value: Any) -> None:
        """Ranks hold the same, bit for bit."""
        for other in self.peers.gather_objects(value):
            torch.testing.assert_close(other, value, rtol=0, atol=0, equal_nan=True)


CHECKS: dict[str, Callable[[Rank], None]] = {}


def check(function: Callable[[Rank], None]) -> Callable[[Rank], None]:
    """Add a check."""
    CHECKS[function.__name__] = function
    return function


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def _gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def both(here: Rank, module: nn.Module, train: Callable[[nn.Module], Any]) -> nn.Module:
    """Train the module spread, and a copy of it plainly; gives the module after comparing all."""
    plain = copy.deepcopy(module)
    with here.plainly():
        expected = train(plain)
    got = train(module)
    close(got, expected)
    close(_gradients(module), _gradients(plain))
    close(module.state_dict(), plain.state_dict())
    here.same_everywhere(_gradients(module))
    return module


@check
def trains_as_one_card_on_uneven_batches(here: Rank) -> None:
    batches = [torch.randn(size, 5) for size in (7, 8, 9, 4, 7)]

    def train(module: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for batch in batches:
            optimizer.zero_grad()
            loss = module(batch).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
            losses.append(loss.detach())
        return losses

    both(here, mlp(), train)
    assert here.spread() == 5, here.reasons()


@check
def gives_gradients_of_inputs_and_by_autograd_grad(here: Rank) -> None:
    x = torch.randn(7, 5)

    def train(module: nn.Module) -> Any:
        inputs = x.clone().requires_grad_()
        loss = module(inputs * 2).square().sum()
        (first,) = torch.autograd.grad(loss, [module[0].weight], retain_graph=True)
        loss.backward()
        return first, inputs.grad

    both(here, mlp(), train)
    assert here.spread() == 1, here.reasons()


@check
def runs_hooks_once_accumulates_and_leaves_frozen_and_unused_alone(here: Rank) -> None:
    x = torch.randn(6, 5)

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.unused, self.frozen = mlp(), nn.Linear(2, 2), nn.Linear(3, 3)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.body(x))

    def train(module: nn.Module) -> Any:
        seen: list[Tensor] = []
        module.body[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        for _ in range(2):
            loss = module(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
        assert module.unused.weight.grad is None
        assert module.frozen.weight.grad is None
        return seen

    both(here, Unused(), train)
    assert here.spread() == 2, here.reasons()


class Sometimes(nn.Module):
    """Uses a layer only where a sample of the shard asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor, asks: Tensor) -> Tensor:
        out = self.always(x)
        return out + self.sometimes(x) * asks[:, None] if bool(asks.any()) else out


@check
def sums_gradients_that_only_some_ranks_have(here: Rank) -> None:
    x, none, last = torch.randn(6, 5), torch.zeros(6), torch.tensor([0.0] * 5 + [1.0])

    def train(module: nn.Module) -> Any:
        module(x, none).sum().backward()
        assert module.sometimes.weight.grad is None
        module(x, last).sum().backward()
        assert module.sometimes.weight.grad is not None
        return None

    both(here, Sometimes(), train)
    assert here.spread() == 2, here.reasons()


@check
def adds_up_sparse_gradients(here: Rank) -> None:
    tokens = torch.randint(0, 20, (7, 4))

    def train(module: nn.Module) -> Any:
        module(tokens).square().mean().backward()
        assert module[0].weight.grad.is_sparse
        module[0].weight.grad = module[0].weight.grad.to_dense()
        return None

    both(here, nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Linear(6, 2)), train)
    assert here.spread() == 1, here.reasons()


class _Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> dict[str, Any]:
        out = self.body(x)
        return {
            "rows": out,
            "loss": out.square().mean(),
            "nothing": None,
            "kept": out[x[:, 0] > 0],
            "pair": [out, x > 0],
        }


@check
def gathers_nestings_means_and_selected_rows(here: Rank) -> None:
    batches = [torch.randn(7, 5) for _ in range(5)]

    def train(module: nn.Module) -> Any:
        values = []
        for x in batches:
            out = module(x)
            (out["loss"] + out["kept"].sum() + out["pair"][0].mean()).backward()
            values.append([out["rows"], out["loss"], out["kept"], *out["pair"]])
            assert out["nothing"] is None
            assert not out["pair"][1].requires_grad
        return values

    both(here, _Outputs(), train)
    assert here.spread() == 5, here.reasons()


@check
def gathers_lists_of_samples(here: Rank) -> None:
    class Boxes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
            return [{"boxes": self.body(image), "score": self.body(image).sum()} for image in images]

    images = [torch.randn(number, 5) for number in (1, 2, 3, 4, 5, 2, 1)]

    def train(module: nn.Module) -> Any:
        found = module(images)
        sum(one["boxes"].square().sum() + one["score"] for one in found).backward()
        return [[one["boxes"], one["score"]] for one in found]

    both(here, Boxes(), train)
    assert here.spread() == 1, here.reasons()


@check
def evaluates_spread_without_gradients(here: Rank) -> None:
    module, x = mlp(), torch.randn(9, 5)
    module(x).sum().backward()
    module.eval()
    with torch.no_grad():
        found = module(x)
    assert not found.requires_grad
    with here.plainly():
        close(found, module(x).detach())
    assert here.spread() == 2, here.reasons()
