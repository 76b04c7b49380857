"""Losses that shards can make exact, and those that they can't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from manycard.errors import LossError

from .. import models
from .making import Make, closing

_WEIGHTS = torch.tensor([1.0, 20.0, 0.1], dtype=torch.float64)


def _classes(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, models.FEATURES, dtype=torch.float64, generator=generator)
    return TensorDataset(x, torch.arange(count) % 3)


def _loss_sum(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def _loss_weighted(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weight=_WEIGHTS)


def _loss_weighted_pair(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(model(batch[0]), batch[1], weight=_WEIGHTS, reduction="sum")
    return total, _WEIGHTS[batch[1]].sum()


def _loss_contrastive(model: Any, batch: Any) -> Tensor:
    scores = model(batch[0])
    return F.cross_entropy(scores @ scores.t(), torch.arange(len(scores)))


def _loss_mean(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _loss_vector(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


LOSSES = {
    "sum": _loss_sum,
    "class_weighted": _loss_weighted,
    "contrastive": _loss_contrastive,
    "mean": _loss_mean,
    "class_weighted_pair": _loss_weighted_pair,
    "vector": _loss_vector,
}


def loss_check(loss: str, make: Make, folder: Path) -> dict[str, Any]:
    """The first step of a loss: which error, whether it trained, and whether a right loss trains afterwards."""
    torch.manual_seed(0)
    module = models.Net().double()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with closing(make()) as parallel:
        model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        (batch,) = parallel.loader(_classes(10), batch_size=10)
        error = ""
        try:
            parallel.train_step(LOSSES[loss], model, optimizer)(batch)
        except LossError as raised:
            error = str(raised)
        trained = any(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
        after = float(parallel.train_step(LOSSES["mean"], model, optimizer)(batch))
        parallel.check_lockstep(model)
        return {"error": error, "trained": trained, "after": after}


def check_disturbs_nothing(make: Make, folder: Path) -> list[Any]:
    """Losses, statistics and a counter of a run with dropout and BatchNorm, with the check and without it."""
    results = []
    for check_loss in (True, False):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
        with closing(make(seed=11)) as parallel:
            model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
            step = parallel.train_step(_loss_mean, model, optimizer, check_loss=check_loss)
            loader = parallel.loader(_classes(36), batch_size=12)
            losses = [float(step(batch)) for batch in loader]
            results.append((losses, {name: value.clone() for name, value in module.state_dict().items()}))
    return results
