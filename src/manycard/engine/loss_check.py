"""Is the loss a mean over samples? A step on several cards is exact only then, or with ``(sum, count)``.

The check computes the loss of a batch whole and in two uneven parts, on one card and without gradients, on a
scratch copy of the module that shares its parameters. Dropout and BatchNorm are put in evaluation mode in the copy,
because they differ between shards by design. If two computations of the whole differ (noise is drawn elsewhere),
nothing can be told, and nothing is said against the loss.

It finds sums, losses weighted by class with unequal shares, means over something other than samples (tokens,
unmasked pixels), and losses that compare samples with each other (contrastive ones).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manycard.engine.batch import count_samples, cut
from manycard.engine.copying import ModuleCopier
from manycard.engine.loss import read_loss
from manycard.engine.settling import settle
from manycard.errors import LossError
from manycard.precision import Precision

__all__ = ["check_mean_loss", "compare_losses"]

LossOf = tuple[Tensor, "float | Tensor | None"]


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


def _compare(
    loss_fn: Callable[[Any, Any], Any], module: nn.Module, batch: Any, samples: int, precision: Precision
) -> None:
    smaller = max(1, samples // 3)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))

    def loss_of(part: Any) -> tuple[Tensor, float | Tensor | None]:
        try:
            with torch.no_grad(), precision.autocast(device):
                loss = read_loss(loss_fn(module, part))
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            # The loss differentiates something itself: a gradient penalty, say.
            with torch.enable_grad(), precision.autocast(device):
                loss = read_loss(loss_fn(module, part))
        return loss.value.detach().double(), loss.count

    parts = cut(batch, [samples - smaller, smaller])
    found = [loss_of(batch), loss_of(batch), loss_of(parts[0]), loss_of(parts[1])]
    compare_losses(found, samples, smaller, precision)


def compare_losses(found: Sequence[LossOf], samples: int, smaller: int, precision: Precision) -> None:
    """Compare the loss of a whole with that of its parts.

    Args:
        found: value (0-dim, fp64) and count of the whole, the whole again, and its two parts.
        samples: of the whole.
        smaller: of the second part.

    Raises:
        LossError: the loss of the whole is not that of its parts.
    """
    (whole, whole_count), (again, _), (large, large_count), (small, small_count) = found
    if whole_count is not None and large_count is not None and small_count is not None:
        whole, again = whole / whole_count, again / whole_count
        joined = (large + small) / (large_count + small_count)
    else:
        joined = (large * (samples - smaller) + small * smaller) / samples
    noise, gap, size = (abs(x) for x in torch.stack([whole - again, whole - joined, whole]).tolist())
    tolerance = precision.tolerance * max(size, 1e-6)
    if noise > tolerance / 10:
        return
    if gap > tolerance + 4 * noise:
        raise LossError(
            f"loss_fn is no mean over samples: {samples} samples give {whole.item():.6g} whole, and"
            f" {joined.item():.6g} as the weighted mean of {samples - smaller} and {smaller}, so cards that each"
            " see a part would train differently from one that sees all",
            fix="return (sum, count) with what the sum is over; or, if the loss compares samples with each other,"
            " write the loop out with model(x), which gives the loss whole outputs; check_loss=False skips this check",
        )
