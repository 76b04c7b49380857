"""Is the loss a mean over samples? A step on several cards is exact only then, or with ``(sum, count)``.

The check computes the loss of a batch whole and in two uneven parts, on one card and without gradients, on a
scratch copy of the module that shares its parameters. Dropout and BatchNorm are put in evaluation mode in the copy,
because they differ between shards by design. If two computations of the whole differ (noise is drawn elsewhere),
nothing can be told, and nothing is said against the loss.

It finds sums, losses weighted by class with unequal shares, means over something other than samples (tokens,
unmasked pixels), and losses that compare samples with each other (contrastive ones).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manycard.engine.batches.batch import count_samples, cut, move
from manycard.engine.batches.cutting import Cut
from manycard.engine.replicas.copying import ModuleCopier
from manycard.engine.replicas.settling import settle
from manycard.engine.steps.loss import read_loss
from manycard.errors import LossError
from manycard.precision import Precision

__all__ = ["check_mean_loss", "check_split_loss", "compare_losses"]

LossOf = tuple[Tensor, "float | Tensor | None"]
"""A mean, or a sum and its count."""
_OTHERWISE = "write the loop out with model(x), which gives the loss whole outputs"


def check_mean_loss(
    loss_fn: Callable[[Any, Any], Any], module: nn.Module, batch: Any, device: torch.device, precision: Precision
) -> None:
    """Compare the loss of `batch` with that of its parts.

    Args:
        module: the primary's module; it is not changed.
        batch: a batch on `device`. On a card too full for it the check is made on half of it, and so on.

    Raises:
        LossError: the loss of the whole is not that of its parts.
    """
    samples = count_samples(batch)
    scratch = ModuleCopier(module, device, share_parameters=True).replica
    settle(scratch)
    while samples >= 2:
        try:
            _compare(loss_fn, scratch, cut(batch, [samples, count_samples(batch) - samples])[0], samples, precision)
        except torch.OutOfMemoryError:
            samples //= 2
            continue
        return


def check_split_loss(
    loss_fn: Callable[[Any, Any], Any],
    module: nn.Module,
    batch: Any,
    cut: Cut,
    device: torch.device,
    precision: Precision,
) -> None:
    """Compare the loss of `batch` with that of the shards that a split of the script's has made of it.

    A ``loss_fn`` that takes nothing but shards, or a batch too large for one card, leaves nothing to compare with, and
    that is said.

    Raises:
        LossError: the loss of the whole is not that of its shards.
    """
    shards = [(shard, size) for shard, size in zip(cut.shards, cut.sizes, strict=True) if size]
    if len(shards) < 2:
        return
    scratch = ModuleCopier(module, device, share_parameters=True).replica
    settle(scratch)
    losses = _Losses(loss_fn, scratch, precision)
    parts = [(*losses.of(move(shard, device)), size) for shard, size in shards]
    try:
        batch = move(batch, device)
        whole, again = losses.of(batch), losses.of(batch)
    except Exception as error:
        warnings.warn(
            f"the loss could not be checked: on the whole batch loss_fn raises {type(error).__name__}; what split"
            " returns is taken to be right as it is",
            stacklevel=2,
        )
        return
    sizes = " and ".join(str(size) for _, size in shards)
    compare_losses(whole, again, parts, f"shards of {sizes}", precision)


def _compare(
    loss_fn: Callable[[Any, Any], Any], module: nn.Module, batch: Any, samples: int, precision: Precision
) -> None:
    smaller = max(1, samples // 3)
    losses = _Losses(loss_fn, module, precision)
    whole, again = losses.of(batch), losses.of(batch)
    sizes = [samples - smaller, smaller]
    parts = [(*losses.of(part), size) for part, size in zip(cut(batch, sizes), sizes, strict=True)]
    compare_losses(whole, again, parts, f"{sizes[0]} and {sizes[1]}", precision)


class _Losses:
    """Computes losses without gradients."""

    def __init__(self, loss_fn: Callable[[Any, Any], Any], module: nn.Module, precision: Precision) -> None:
        self._loss_fn = loss_fn
        self._module = module
        self._precision = precision
        self._device = next((p.device for p in module.parameters()), torch.device("cpu"))

    def of(self, part: Any) -> LossOf:
        """The loss of a part of a batch, and its count, if it is a sum."""
        try:
            with torch.no_grad(), self._precision.autocast(self._device):
                loss = read_loss(self._loss_fn(self._module, part))
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            # The loss differentiates something itself: a gradient penalty, say.
            with torch.enable_grad(), self._precision.autocast(self._device):
                loss = read_loss(self._loss_fn(self._module, part))
        return loss.value.detach().double(), loss.count


def compare_losses(
    whole: LossOf,
    again: LossOf,
    parts: Sequence[tuple[Tensor, float | Tensor | None, int]],
    named: str,
    precision: Precision,
    otherwise: str = _OTHERWISE,
) -> None:
    """Compare the loss of a whole, computed twice, with those of its parts.

    Args:
        whole: value (0-dim, fp64) and count.
        again: the same once more, for what differs by itself.
        parts: value, count and samples of each.
        named: the parts, in words.
        otherwise: what to do with a loss that compares samples with each other.

    Raises:
        LossError: the loss of the whole is not that of its parts.
    """
    samples = sum(size for *_, size in parts)
    value, repeated = whole[0], again[0]
    counts = [count for _, count, _ in parts if count is not None]
    if whole[1] is not None and len(counts) == len(parts):
        value, repeated = value / whole[1], repeated / whole[1]
        joined = sum((part for part, *_ in parts[1:]), parts[0][0]) / sum(counts[1:], counts[0])
    else:
        joined = sum((part * size for part, _, size in parts[1:]), parts[0][0] * parts[0][2]) / samples
    noise, gap, size = (abs(x) for x in torch.stack([value - repeated, value - joined, value]).tolist())
    tolerance = precision.tolerance * max(size, 1e-6)
    if noise > tolerance / 10:
        return
    if gap > tolerance + 4 * noise:
        raise LossError(
            f"loss_fn is no mean over samples: {samples} samples give {value.item():.6g} whole, and"
            f" {joined.item():.6g} as the weighted mean of {named}, so cards that each"
            " see a part would train differently from one that sees all",
            fix="return (sum, count) with what the sum is over; or, if the loss compares samples with each other,"
            f" {otherwise}; check_loss=False skips this check",
        )
