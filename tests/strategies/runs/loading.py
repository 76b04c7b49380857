"""Which samples loaders hand out and `evaluate` counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from .. import models
from ..cases import mse, regression
from .making import Make, closing


class Marks(nn.Module):
    """Returns what it is given and notes in which mode."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))
        self.drop = nn.Dropout(0.5)
        self.still = nn.Dropout(0.5).eval()

    def forward(self, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled(), "evaluation computes no gradients"
        return self.still(self.drop(x)) * self.factor


def _marks_metric(model: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
    (x,) = batch
    seen = model(x)
    return {
        "mean": (seen.sum(), len(x)),
        "square": (seen.square().sum(), torch.tensor(len(x))),
        "samples": (len(x), int((seen == 1).sum())),
    }


def evaluate(samples: int, batch_size: int, shuffle: bool, make: Make, folder: Path) -> dict[str, Any]:
    """Metrics that come out only if every sample 1 .. `samples` is used exactly once."""
    data = TensorDataset(torch.arange(1, samples + 1, dtype=torch.float64))
    with closing(make(seed=3)) as parallel:
        model = parallel.setup(Marks().double())
        model.train()
        model.still.eval()
        loader = parallel.loader(data, batch_size=batch_size, shuffle=shuffle)
        metrics = [parallel.evaluate(_marks_metric, model, loader) for _ in range(2)]
        return {"metrics": metrics, "modes": (model.training, model.drop.training, model.still.training)}


def loaded_samples(samples: int, batch_size: int, drop_last: bool, make: Make, folder: Path) -> list[Any]:
    """The samples this process was handed in two shuffled epochs, with which count for weights."""
    data = TensorDataset(torch.arange(samples))
    with closing(make(seed=3)) as parallel:
        loader = parallel.loader(data, batch_size=batch_size, shuffle=True, drop_last=drop_last)
        return [
            [parallel.gather(batch[0]).tolist() for batch in loader],
            [parallel.gather(batch[0]).tolist() for batch in loader],
            len(loader),
        ]


def _columns(pairs: list[Any]) -> tuple[Tensor, ...]:
    return tuple(torch.stack(part) for part in zip(*pairs, strict=True))


def own_loader(make: Make, folder: Path) -> list[float]:
    """A DataLoader of the user's, with its own collate function, as the global batch."""
    data = DataLoader(regression(20), batch_size=7, collate_fn=_columns)
    torch.manual_seed(0)
    module = models.Net()
    with closing(make()) as parallel:
        model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        step = parallel.train_step(mse, model, optimizer)
        return [float(step(batch)) for batch in parallel.loader(data)]
