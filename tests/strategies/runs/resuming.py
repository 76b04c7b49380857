"""A run that stops at a checkpoint and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .. import models
from ..cases import mse, regression
from .making import Make, closing

HALF = 10
"""Steps before the checkpoint: in the middle of the second epoch."""


def _resumable(make: Make) -> tuple[Any, ...]:
    """A training with dropout, shuffling and a schedule, just set up; starts differ by the global seed."""
    parallel = make(seed=5)
    module = models.Dropped()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    model, optimizer = parallel.setup(module, optimizer)
    loader = parallel.loader(regression(50), batch_size=8, shuffle=True)
    step = parallel.train_step(mse, model, optimizer, clip_norm=1.0, scheduler=scheduler)
    return parallel, module, model, optimizer, scheduler, loader, step


def _some_steps(loader: Any, step: Any, count: int) -> list[float]:
    losses: list[float] = []
    while len(losses) < count:
        for batch in loader:
            losses.append(float(step(batch)))
            if len(losses) == count:
                break
    return losses


def resume(make: Make, folder: Path) -> dict[str, Any]:
    """20 steps straight, and 10 steps, a checkpoint, and 10 more in a `Parallel` of its own."""
    torch.manual_seed(1)
    parallel, module, *_, loader, step = _resumable(make)
    with closing(parallel):
        straight = _some_steps(loader, step, 2 * HALF)
        final = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    torch.manual_seed(1)
    parallel, module, model, optimizer, scheduler, loader, step = _resumable(make)
    path = folder / "half.ckpt"
    with closing(parallel):
        parted = _some_steps(loader, step, HALF)
        parallel.save(path, model=model, optimizer=optimizer, loader=loader, epoch=1, schedule=scheduler.state_dict())
    torch.manual_seed(2)  # whatever the new run draws before it loads must not matter
    parallel, module, model, optimizer, scheduler, loader, step = _resumable(make)
    with closing(parallel):
        _some_steps(loader, step, 3)
        extra = parallel.load(path, model=model, optimizer=optimizer, loader=loader)
        scheduler.load_state_dict(extra["schedule"])
        parted += _some_steps(loader, step, HALF)
        parallel.check_lockstep(model)
        again = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return {"straight": straight, "parted": parted, "final": final, "again": again, "epoch": extra["epoch"]}
