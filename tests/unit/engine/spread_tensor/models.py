"""A small language model, alone and left spread, and how the two are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from manycard.engine.spread_tensor import SpreadTensor
from tests.unit.engine.twins import close, same_state, twins

TIMES, WORDS = 4, 5


class Words(nn.Module):
    """Logits of [samples, times, words] from as many rows of 6 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, TIMES * WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).view(-1, TIMES, WORDS)


def batch(samples: int, seed: int = 1) -> Tensor:
    """Random rows."""
    return torch.randn(samples, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def labels(samples: int, ignored: float = 0.0, seed: int = 2) -> Tensor:
    """Random words, a share of them ignored, more of them in the first samples."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, WORDS, (samples, TIMES), generator=generator)
    dropped = torch.rand(samples, TIMES, generator=generator) * torch.linspace(0.5, 2, samples)[:, None] < ignored
    return drawn.masked_fill(dropped, -100)


def numbers(samples: int, seed: int = 3) -> Tensor:
    """Random targets as large as the logits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(samples, TIMES, WORDS, dtype=torch.float64, generator=generator)


def is_spread(tensor: Any) -> bool:
    """Whether a tensor is still in parts."""
    return isinstance(tensor, SpreadTensor) and tensor.held.spread


def compare(
    work: Callable[[Tensor], Any], samples: int = 7, cards: int = 3, *, stays: bool | None = True, **options: Any
) -> Any:
    """Train one step with ``work(logits)``, alone and left spread; results, gradients and parameters are equal.

    Args:
        work: makes a tensor of the logits; its mean is what is differentiated.
        stays: whether the logits must still be spread after it; None where that doesn't matter.
    """
    alone, together = twins(Words, cards, **{"outputs": "spread", **options})
    results = []
    for model in (alone, together):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        logits = model(batch(samples))
        assert is_spread(logits) == (model is together and min(samples, cards) > 1)
        result = work(logits)
        results.append(result)
        if stays is not None and model is together and min(samples, cards) > 1:
            assert is_spread(logits) == stays
        if isinstance(result, Tensor) and result.requires_grad:
            (result if result.dim() == 0 else result.mean()).backward()
            if stays and model is together and min(samples, cards) > 1:
                assert is_spread(logits), "the backward pass gathered the logits"
        optimizer.step()
    close(plainly(results[1]), plainly(results[0]))
    same_state(alone, together)
    return results[1]


def plainly(value: Any) -> Any:
    """Ordinary tensors without a graph."""
    if isinstance(value, Tensor):
        return (value.held.read() if isinstance(value, SpreadTensor) else value.detach()).clone()
    return [plainly(part) for part in value] if isinstance(value, list | tuple) else value
