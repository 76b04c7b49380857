"""The training that every strategy must do exactly as one card does.

A case is what its user would write: a model, its samples, a loss, optimizers, and how the loop runs. Models are
tiny and smooth (Tanh), so that an error in the fifth digit of a gradient shows after 20 steps. They are made under
the default dtype of the run, fp64 or fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.checkpoint import checkpoint

from . import models

__all__ = ["CASES", "STEPS", "Case"]

STEPS = 20
"""Calls of `step` in a case."""


def sgd(model: nn.Module) -> list[Optimizer]:
    """SGD with momentum and weight decay over everything."""
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)]


def adamw(model: nn.Module) -> list[Optimizer]:
    """AdamW over everything."""
    return [torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)]


def _two(model: nn.Module) -> list[Optimizer]:
    head = list(model.head.parameters())
    body = [parameter for name, parameter in model.named_parameters() if not name.startswith("head.")]
    return [torch.optim.SGD(body, lr=0.1, momentum=0.9), torch.optim.AdamW(head, lr=1e-2)]


def _sparse(model: nn.Module) -> list[Optimizer]:
    return [
        torch.optim.SparseAdam(list(model.embedding.parameters()), lr=1e-2),
        torch.optim.SGD(model.head.parameters(), lr=0.1),
    ]


def _two_groups(model: nn.Module) -> list[Optimizer]:
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]
    return [torch.optim.AdamW(groups, lr=1e-2)]


def regression(count: int) -> list[Any]:
    """`count` pairs of 6 features and 3 targets."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, models.FEATURES, generator=generator)
    y = torch.sin(x[:, : models.TARGETS] * 2) + x[:, 3:]
    return list(zip(x, y, strict=True))


def images(count: int) -> list[Any]:
    """`count` pairs of a 2x5x5 image and 3 targets."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, 2, 5, 5, generator=generator) + 0.5
    return [(image, image.mean(dim=(1, 2)).repeat(2)[:3]) for image in x]


def flagged(count: int) -> list[Any]:
    """Regression samples, some flagged: in turn on the first card only, the last only, nowhere, everywhere."""
    pattern = {0: lambda at: at < 2, 1: lambda at: at == 11, 2: lambda at: False, 3: lambda at: True}
    flags = [pattern[index // 12 % 4](index % 12) for index in range(count)]
    return [(x, torch.tensor(flag), y) for (x, y), flag in zip(regression(count), flags, strict=True)]


def tokens(count: int) -> list[Any]:
    """Padded sequences of very different lengths with their next tokens; -100 where nothing is to be predicted."""
    generator = torch.Generator().manual_seed(count)
    samples = []
    for index in range(count):
        length = 1 + (index * index) % models.LENGTH
        ids = torch.randint(0, models.WORDS, (models.LENGTH,), generator=generator)
        targets = ids.roll(-1).clone()
        targets[length:] = -100
        if index % 4 == 3:
            targets[:] = -100  # a sample, and sometimes a whole shard, without a token that counts
        samples.append((ids, targets))
    return samples


def dicts(count: int) -> list[Any]:
    """Regression samples as dicts."""
    return [{"x": x, "y": y} for x, y in regression(count)]


def nested(count: int) -> list[Any]:
    """Regression samples as dicts of tuples and lists."""
    return [({"x": x, "more": [x * 2, (x[:2],)]}, {"targets": (y,)}) for x, y in regression(count)]


def mse(model: Any, batch: Any) -> Tensor:
    """Mean squared error of a model called once."""
    x, y = batch
    return F.mse_loss(model(x), y)


def _flag_loss(model: Any, batch: Any) -> Tensor:
    x, flag, y = batch
    return F.mse_loss(model(x, flag), y)


def _dict_loss(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def _nested_loss(model: Any, batch: Any) -> Tensor:
    inputs, targets = batch
    first, (second,) = inputs["more"]
    wide = torch.cat([second, second, second], dim=1)
    return F.mse_loss(model(inputs["x"] + first + wide), targets["targets"][0])


def _parts_loss(model: Any, batch: Any) -> Tensor:
    x, y = batch
    hidden = model.body(x)
    again = model.body(hidden @ model.mix)
    return F.mse_loss(model.head(again), y) + 0.1 * model.roughness(hidden)


def _twice_loss(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y) + F.mse_loss(model(x.flip(1)), y)


def _penalty_loss(model: Any, batch: Any) -> Tensor:
    x, _ = batch
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def _token_mean(model: Any, batch: Any) -> Tensor:
    ids, _ = batch
    return F.cross_entropy(model(ids).transpose(1, 2), ids.roll(1, dims=1))


def _token_sum(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    ids, targets = batch
    total = F.cross_entropy(model(ids).transpose(1, 2), targets, ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()


def _sum_of_squares(model: Any, batch: Any) -> tuple[Tensor, int]:
    x, y = batch
    return (model(x) - y).square().sum(), len(x)


def _freeze_body(model: nn.Module) -> nn.Module:
    model.body[0].requires_grad_(False)
    return model


def _evaluation_mode_norm() -> nn.Module:
    model = models.Normed(nn.BatchNorm1d)
    for norm in model.norms():
        norm.running_mean.normal_(generator=torch.Generator().manual_seed(1))
        norm.running_var.uniform_(0.5, 2, generator=torch.Generator().manual_seed(2))
        norm.eval()
    return model


def _cosine(optimizer: Optimizer) -> LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)


@dataclass(frozen=True)
class Case:
    """One training that every strategy must do alike."""

    name: str
    make_model: Callable[[], nn.Module] = models.Net
    loss_fn: Callable[[Any, Any], Any] = mse
    """``loss_fn(model, batch)``: a mean, or ``(sum, count)``."""
    make_samples: Callable[[int], list[Any]] = regression
    make_optimizers: Callable[[nn.Module], list[Optimizer]] = sgd
    samples: int = 48
    """Samples in an epoch."""
    batch_size: int = 12
    """Samples in a global batch."""
    accumulate: int = 1
    clip_norm: float | None = None
    make_scheduler: Callable[[Optimizer], LRScheduler] | None = None
    """Of the first optimizer; stepped after each update."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `Parallel`."""
    in_explicit_loop: bool = True
    """Whether the explicit loop can express it: a mean loss of outputs of ``model(x)``."""


def _accumulated(name: str, **settings: Any) -> Case:
    """Groups of 4, epochs of 10 micro-batches: the last group has 2, and the last micro-batch 3 samples."""
    return Case(name, accumulate=4, samples=57, batch_size=6, **settings)


_SYNC = {"sync_batchnorm": True}

CASES: Sequence[Case] = (
    Case("sgd_momentum"),
    Case("adamw", make_optimizers=adamw),
    Case("two_param_groups", make_optimizers=_two_groups),
    _accumulated("accumulate_sgd"),
    _accumulated("accumulate_adamw_clip_schedule", make_optimizers=adamw, clip_norm=0.05, make_scheduler=_cosine),
    Case("clip", clip_norm=0.1),
    Case("schedule", make_scheduler=_cosine),
    Case("uneven_last_batch", samples=50, batch_size=11),
    Case("last_batch_smaller_than_cards", samples=35, batch_size=11, make_optimizers=adamw),
    Case("two_samples_in_all", samples=2, batch_size=2),
    Case("one_sample_in_all", samples=1, batch_size=1, make_optimizers=adamw),
    Case("frozen", make_model=lambda: _freeze_body(models.Net()), make_optimizers=adamw),
    Case("tied", models.TiedWords, _token_mean, tokens, adamw, clip_norm=0.2),
    Case("sometimes_unused", models.SometimesUsed, _flag_loss, flagged, clip_norm=0.5),
    Case("sometimes_unused_adamw", models.SometimesUsed, _flag_loss, flagged, adamw),
    Case("sometimes_unused_accumulated", models.SometimesUsed, _flag_loss, flagged, adamw, accumulate=2),
    Case("two_optimizers", make_optimizers=_two, clip_norm=0.3, make_scheduler=_cosine),
    Case("batchnorm_in_eval", _evaluation_mode_norm),
    Case("sync_batchnorm", partial(models.Normed, nn.BatchNorm1d), options=_SYNC),
    Case("sync_batchnorm_2d", models.ConvNormed, mse, images, adamw, options=_SYNC),
    Case("sync_batchnorm_uneven", partial(models.Normed, nn.BatchNorm1d), samples=50, batch_size=11, options=_SYNC),
    Case("sync_batchnorm_few", partial(models.Normed, nn.BatchNorm1d), samples=35, batch_size=11, options=_SYNC),
    Case("sync_batchnorm_variants", models.OddlyNormed, options=_SYNC),
    Case("token_sums", models.Words, _token_sum, tokens, adamw, in_explicit_loop=False),
    Case("token_sums_few", models.Words, _token_sum, tokens, samples=35, batch_size=11, in_explicit_loop=False),
    _accumulated(
        "token_sums_accumulated",
        make_model=models.Words,
        loss_fn=_token_sum,
        make_samples=tokens,
        clip_norm=0.1,
        in_explicit_loop=False,
    ),
    Case("sum_and_integer", loss_fn=_sum_of_squares, samples=50, batch_size=11, clip_norm=1.0, in_explicit_loop=False),
    Case("dict_batches", loss_fn=_dict_loss, make_samples=dicts),
    Case("nested_batches", loss_fn=_nested_loss, make_samples=nested),
    Case("several_submodules", models.InParts, _parts_loss, in_explicit_loop=False),
    Case("called_twice", loss_fn=_twice_loss),
    Case("sparse_embedding", models.SparseWords, _token_mean, tokens, _sparse, samples=50, batch_size=11),
    Case("checkpointed", partial(models.Checkpointed, partial(checkpoint, use_reentrant=False))),
    Case("checkpointed_reentrant", partial(models.Checkpointed, partial(checkpoint, use_reentrant=True))),
    Case("gradient_penalty", loss_fn=_penalty_loss, in_explicit_loop=False),
    Case("odd_parameters", models.OddParameters, make_optimizers=adamw, clip_norm=0.5),
)
