"""The modules of the training cases: each has one thing that multi-card training gets wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

FEATURES, HIDDEN, TARGETS = 6, 8, 3
WORDS, LENGTH = 11, 7


class Net(nn.Module):
    """A body and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
        self.head = nn.Linear(HIDDEN, TARGETS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Dropped(Net):
    """Dropout between body and head."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.dropout(self.body(x), 0.3, self.training))


class InParts(Net):
    """A module whose parts, parameters and methods the loss uses by name, never the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(HIDDEN)[:, :FEATURES] * 0.5)

    def roughness(self, hidden: Tensor) -> Tensor:
        return (hidden[:, 1:] - hidden[:, :-1]).square().mean()


class TiedWords(nn.Module):
    """The embedding's weight is the head's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.body = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(ids))))


class Words(nn.Module):
    """Words in, scores of words out."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN, sparse=sparse)
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(ids)))


class SparseWords(Words):
    """The embedding's gradient is sparse."""

    def __init__(self) -> None:
        super().__init__(sparse=True)


class SometimesUsed(Net):
    """`extra` works on flagged samples only, so some cards, or all, don't use it; `never` is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(FEATURES, TARGETS)
        self.never = nn.Linear(2, 2)

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        y = super().forward(x)
        if bool(flag.any()):
            y = y.clone()
            y[flag] = y[flag] + self.extra(x[flag])
        return y


class Normed(nn.Module):
    """BatchNorm between two layers, of any kind that normalises vectors."""

    def __init__(self, make_norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, HIDDEN)
        self.norm = make_norm(HIDDEN)
        self.head = nn.Linear(HIDDEN, TARGETS)

    def norms(self) -> Iterator[Any]:
        yield self.norm

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.body(x))))


class ConvNormed(nn.Module):
    """BatchNorm after a convolution."""

    def __init__(self) -> None:
        super().__init__()
        # No bias: BatchNorm takes it away again, so its gradient is rounding alone, which AdamW would blow up.
        self.body = nn.Conv2d(2, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, TARGETS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.body(x))).mean(dim=(2, 3)))


class OddlyNormed(nn.Module):
    """BatchNorm without affine parameters, without running statistics, with a cumulative average, and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, HIDDEN)
        self.plain = nn.BatchNorm1d(HIDDEN, affine=False)
        self.untracked = nn.BatchNorm1d(HIDDEN, track_running_stats=False)
        self.cumulative = nn.BatchNorm1d(HIDDEN, momentum=None)
        self.still = nn.BatchNorm1d(HIDDEN).eval()
        self.head = nn.Linear(HIDDEN, TARGETS)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.plain(self.body(x)))
        x = torch.tanh(self.untracked(x * x + x))
        x = torch.tanh(self.cumulative(x * x + x))
        return self.head(self.still(x))


class Checkpointed(Net):
    """The body is computed again in the backward pass."""

    def __init__(self, again: Callable[..., Tensor]) -> None:
        super().__init__()
        self.again = again
        self.first = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.body, self.first(x)))


class OddParameters(Net):
    """A 0-dim parameter, an empty one, one of another dtype, one that is not contiguous, a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.other = nn.Parameter(torch.linspace(-1, 1, TARGETS, dtype=torch.float64))  # in fp32 runs, another
        self.slanted = nn.Parameter(torch.linspace(-1, 1, FEATURES * 4).view(4, FEATURES).t())
        self.register_buffer("turn", torch.tensor([1 + 1j, 0.5 - 2j, 1j]))
        self.register_buffer("offset", torch.ones(TARGETS), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self.scale + (x @ self.slanted).sum(1, keepdim=True) * 0.1
        return y + self.other.to(y.dtype) * self.turn.real.to(y.dtype) + self.offset
