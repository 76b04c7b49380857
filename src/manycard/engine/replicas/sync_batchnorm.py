"""BatchNorm over the whole global batch, between the cards of one process or between ranks.

With x [n, C, ...] on each card, every card hands in its count, mean and sum of squared deviations per channel
(2C + 1 numbers), and combines all of them by the parallel formula of Chan, Golub and LeVeque (1979), which loses no
precision however far the cards' means lie apart. Backward exchanges 2C numbers the same way. A rank that holds a
stand-in for an empty shard hands in a count of 0.

All cards come to the same statistics, in the same order of summation, so running statistics stay equal too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from manycard.engine.driving.threads import Place, current_place

__all__ = ["SyncedBatchNorm", "alone", "convert_batchnorm", "counting_nothing"]

Exchange = Callable[[Tensor], Tensor]
"""Takes this card's [k], gives all cards' [cards, k]."""

_counts = True
_alone = False


@contextmanager
def counting_nothing() -> Iterator[None]:
    """In this context the process's samples are stand-ins and don't count in statistics."""
    global _counts
    _counts = False
    try:
        yield
    finally:
        _counts = True


@contextmanager
def alone() -> Iterator[None]:
    """In this context the process has the whole batch, as every other rank has: statistics are its own."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def convert_batchnorm(module: nn.Module) -> nn.Module:
    """Make every BatchNorm inside `module` one that counts the global batch.

    The layers stay the same objects, so that a module that also keeps them in a plain list calls them converted.

    Returns:
        `module`.
    """
    for part in module.modules():
        if isinstance(part, _BatchNorm):
            part.__class__ = SyncedBatchNorm
    return module


class SyncedBatchNorm(_BatchNorm):
    """A BatchNorm whose training statistics are those of all cards' shards together."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise [n, C, ...] by the statistics of all cards in training, as BatchNorm does otherwise."""
        self._check_input_dim(input)
        exchange = _current_exchange()
        if exchange is None or not (self.training or self.running_mean is None):
            return super().forward(input)
        return _Normalise.apply(input, self.weight, self.bias, self, exchange)  # type: ignore[no-any-return]

    def note_statistics(self, mean: Tensor, squares: Tensor, count: Tensor) -> None:
        """Move the running statistics, as BatchNorm does, by the unbiased variance ``squares / (count - 1)``."""
        if self.running_mean is None or self.running_var is None or not self.training:
            return
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        rate = 0.0 if momentum is None else momentum
        self.running_mean.mul_(1 - rate).add_(mean.to(self.running_mean.dtype), alpha=rate)
        unbiased = squares / (count - 1).clamp(min=1)
        self.running_var.mul_(1 - rate).add_(unbiased.to(self.running_var.dtype), alpha=rate)


def _current_exchange() -> Exchange | None:
    place = current_place()
    if place is not None:
        return lambda mine: _exchange_in_process(place, mine)
    if not _alone and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return _exchange_between_ranks
    return None


def _exchange_in_process(place: Place, mine: Tensor) -> Tensor:
    return torch.stack([theirs.to(mine.device) for theirs in place.meet(mine)])


def _exchange_between_ranks(mine: Tensor) -> Tensor:
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine.contiguous())
    return torch.stack(gathered)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, layer: SyncedBatchNorm, exchange: Exchange
    ) -> Tensor:
        exact = x.double() if x.dtype == torch.float64 else x.float()
        axes = [axis for axis in range(x.dim()) if axis != 1]
        channels = x.size(1)
        own_mean = exact.mean(axes)
        own_squares = (exact - _wide(own_mean, x)).square().sum(axes)
        count = exact.new_tensor([x.numel() // channels if _counts else 0])
        used = float(_counts)
        all_cards = exchange(torch.cat([count, own_mean * used, own_squares * used]))
        counts, means, squares = all_cards[:, :1], all_cards[:, 1 : channels + 1], all_cards[:, channels + 1 :]
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        spread = squares.sum(0) + (counts * (means - mean).square()).sum(0)
        scale = torch.rsqrt(spread / total + layer.eps)
        layer.note_statistics(mean, spread, total)
        normal = (exact - _wide(mean, x)) * _wide(scale, x)
        ctx.save_for_backward(normal, weight, scale, total)
        ctx.exchange, ctx.axes, ctx.dtype, ctx.used = exchange, axes, x.dtype, used
        out = normal if weight is None else normal * _wide(weight.to(exact.dtype), x)
        return (out if bias is None else out + _wide(bias.to(exact.dtype), x)).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        normal, weight, scale, total = ctx.saved_tensors
        grad = gradients[0].to(normal.dtype)
        own = torch.stack([grad.sum(ctx.axes), (grad * normal).sum(ctx.axes)])
        of_bias, of_weight = ctx.exchange(own.flatten()).sum(0).view_as(own) / total
        inner = grad - _wide(of_bias, grad) - normal * _wide(of_weight, grad)
        factor = scale if weight is None else scale * weight.to(scale.dtype)
        # A stand-in's rows moved no statistics, so nothing flows back to them.
        of_input = (inner * _wide(factor, grad) * ctx.used).to(ctx.dtype)
        if weight is None:
            return of_input, None, None, None, None
        return of_input, own[1].to(weight.dtype), own[0].to(weight.dtype), None, None


def _wide(channel_values: Tensor, like: Tensor) -> Tensor:
    """[C] as [1, C, 1, ...], to meet `like`."""
    return channel_values.view(1, -1, *[1] * (like.dim() - 2))
