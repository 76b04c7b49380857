"""Modules whose calls are recorded on the CPU, compared with eager ones and with one card in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manycard as mc
from manycard.engine.calls.call_graphs import CallGraphs
from tests.unit.engine.repeating import Repeating
from tests.unit.engine.twins import close

STEPS = 9
Loop = Callable[[Any], Any]


class Net(nn.Module):
    """Two layers, one that is not used and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.relu(self.frozen(torch.tanh(self.first(x)))))


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.norm(x))


class Graphed:
    """A module's graphs, on recorders of the CPU."""

    def __init__(self, model: Any) -> None:
        def protected() -> list[Tensor]:
            return [t for module in model.engine.replicas.modules for t in (*module.parameters(), *module.buffers())]

        self.reasons: list[str] = []
        self.recorders = [Repeating(protected) for _ in model.cards]
        model._spreader.graphs = CallGraphs(self.recorders, self.reasons.append)

    @property
    def replays(self) -> int:
        return min(recorder.replays for recorder in self.recorders)


def make(kind: Callable[[], nn.Module], cards: int, *, graphs: bool) -> tuple[Any, Graphed | None]:
    torch.manual_seed(0)
    model = mc.DataParallel(kind().double(), device_ids=f"cpu:{cards}")
    return model, Graphed(model) if graphs else None


def outcome(model: Any, loop: Loop) -> Any:
    torch.manual_seed(1)
    given = loop(model)
    module = getattr(model, "module", model)
    state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    gradients = {name: own.grad for name, own in module.named_parameters()}
    return given, state, gradients


def compare(kind: Callable[[], nn.Module], loop: Loop, cards: int, *, alone: bool = True) -> Graphed:
    """Run a loop with graphs and without, and on one card in plain PyTorch; all must give the same."""
    eager, _ = make(kind, cards, graphs=False)
    expected = outcome(eager, loop)
    together, graphed = make(kind, cards, graphs=True)
    assert graphed is not None
    close(outcome(together, loop), expected)
    if alone:
        torch.manual_seed(0)
        close(expected, outcome(kind().double(), loop))
    return graphed


def batches(count: int = STEPS, size: int = 10) -> Any:
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        yield x, torch.randint(4, (size,), generator=generator)


def losses_of(model: Any, optimizer: Any, **settings: Any) -> list[Tensor]:
    """The loop that people write."""
    clip, accumulate, to_none = settings.get("clip"), settings.get("accumulate", 1), settings.get("to_none", True)
    losses = []
    for number, (x, labels) in enumerate(batches(STEPS * accumulate)):
        loss = F.cross_entropy(model(x), labels) / accumulate
        loss.backward()
        losses.append(loss.detach())
        if number % accumulate == accumulate - 1:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    return losses


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01)


def adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), 0.01)
