"""A small language model with everything that crosses stages, and its training alone and in a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import manycard as mc

__all__ = ["LENGTH", "WORDS", "Language", "batches", "compare", "loss_fn", "made", "pipelined", "train_alone"]

WORDS, LENGTH, WIDTH = 29, 6, 12
Make = Callable[[nn.Module], Optimizer]


class Block(nn.Module):
    """Half of a transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Language(nn.Module):
    """Words in, scores out. The head's weight is the embedding's; positions are a parameter of the whole; the words'
    embeddings skip all blocks; BatchNorm is in evaluation mode."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.statistics = nn.BatchNorm1d(WIDTH).eval()
        self.statistics.running_mean.normal_()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        _, length = ids.size()
        if length > LENGTH:
            raise ValueError(f"at most {LENGTH} words, not {length}")
        words = self.words(ids)
        x = words + self.places[:length]
        for block in self.blocks:
            x = block(x)
        x = self.statistics((x + words).transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(x)) + self.places.mean()


def made(seed: int = 0, make: Callable[[], nn.Module] = Language) -> nn.Module:
    """A model with its own draws."""
    torch.manual_seed(seed)
    return make()


def loss_fn(model: Any, ids: Tensor) -> Tensor:
    """Cross-entropy of the next word."""
    return F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())


def batches(*sizes: int) -> list[Tensor]:
    """Batches of drawn words, of these sizes."""
    draws = torch.Generator().manual_seed(3)
    return [torch.randint(0, WORDS, (size, LENGTH), generator=draws) for size in sizes]


def sgd(model: nn.Module) -> Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def train_alone(
    model: nn.Module,
    data: list[Tensor],
    make: Make = sgd,
    clip_norm: float | None = None,
    accumulate: int = 1,
    loss: Callable[[Any, Any], Tensor] = loss_fn,
) -> list[float]:
    """Plain PyTorch: groups of `accumulate` batches, each sample alike; the losses."""
    optimizer = make(model)
    losses = []
    for start in range(0, len(data), accumulate):
        group = data[start : start + accumulate]
        optimizer.zero_grad()
        for batch in group:
            value = loss(model, batch)
            losses.append(value.item())
            (value * len(batch) / sum(map(len, group))).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return losses


@contextmanager
def pipelined(model: nn.Module, *args: Any, **settings: Any) -> Iterator[mc.Pipeline]:
    """A pipeline that is closed at the end."""
    pipeline = mc.Pipeline(model, *args, **settings)
    try:
        yield pipeline
    finally:
        pipeline.close()


def compare(
    model: nn.Module, data: list[Tensor], make: Make = sgd, *, tolerance: float = 2e-6, **settings: Any
) -> None:
    """Train a copy of `model` alone and another in a pipeline; losses and every parameter and buffer must agree."""
    step_settings = {key: settings.pop(key) for key in ("clip_norm", "accumulate") if key in settings}
    alone, spread = copy.deepcopy(model), copy.deepcopy(model)
    expected = train_alone(alone, data, make, **step_settings)
    optimizer = make(spread)
    with pipelined(spread, **settings) as pipeline:
        step = pipeline.train_step(loss_fn, optimizer, **step_settings)
        actual = [step(batch).item() for batch in data]
        step.flush()
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    for (name, mine), (other, theirs) in zip(alone.state_dict().items(), spread.state_dict().items(), strict=True):
        assert name == other
        message = f"{name} differs by {(mine - theirs).abs().max().item():.2g}"
        torch.testing.assert_close(theirs, mine, rtol=tolerance, atol=tolerance, msg=message)
