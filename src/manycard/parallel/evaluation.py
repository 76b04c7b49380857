"""Metrics over a whole set, of all cards and ranks.

Behaviour:
    * Every sample counts once, whatever the batches and shards; no batch waits for a card.
    * The module evaluates in evaluation mode, without gradients and with rank 0's buffers. Its parts are in the mode
      of before afterwards, also when a metric fails.
    * The feed of before is put back, since a step may still come for its batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from manycard.hangs import PULSE
from manycard.strategies import Strategy
from manycard.strategies.strategy import MetricFn

__all__ = ["evaluate"]


def evaluate(strategy: Strategy, metric_fn: MetricFn, model: nn.Module, loader: Iterable[Any]) -> dict[str, float]:
    """``{name: sum of sums / sum of counts}`` over the loader's batches, the same on every rank; NaN for no count."""
    totals: dict[str, list[Any]] = {}
    with PULSE.busy("evaluation"), _evaluating(strategy, model):
        for batch in loader:
            for found in strategy.evaluate(model, metric_fn, batch):
                _add_metrics(totals, found)
            PULSE.progress()
    host = {name: (float(total), float(count)) for name, (total, count) in totals.items()}
    everyone = strategy.peers.gather_objects(host)
    names = dict.fromkeys(name for each in everyone for name in each)
    sums = {name: [each.get(name, (0.0, 0.0)) for each in everyone] for name in names}
    return {name: _ratio(sum(t for t, _ in parts), sum(c for _, c in parts)) for name, parts in sums.items()}


@contextmanager
def _evaluating(strategy: Strategy, model: nn.Module) -> Iterator[None]:
    inner, feed = strategy.unwrap(model), strategy.feed
    strategy.settle(model)
    newest = feed.current
    modes = [(part, part.training) for part in inner.modules()]
    inner.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        feed.current = newest
        for part, training in modes:
            part.training = training


def _add_metrics(totals: dict[str, list[Any]], found: dict[str, tuple[Any, Any]]) -> None:
    """Add one shard's sums and counts, on whichever device they are, without waiting for it."""
    for name, (total, count) in found.items():
        numbers = [value.detach().double() if isinstance(value, Tensor) else float(value) for value in (total, count)]
        if name not in totals:
            totals[name] = numbers
            continue
        for index, number in enumerate(numbers):
            held = totals[name][index]
            if isinstance(held, Tensor) and isinstance(number, Tensor):
                number = number.to(held.device, non_blocking=True)
            totals[name][index] = held + number


def _ratio(total: float, count: float) -> float:
    return total / count if count else float("nan")
