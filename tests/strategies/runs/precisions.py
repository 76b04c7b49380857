"""Training in bf16 and fp16, and draws of dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from .. import models
from ..cases import mse
from .making import Make, closing


def _line(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, models.FEATURES, generator=generator)
    return list(zip(x, x[:, :3] * 0.5 - 0.2, strict=True))


def converge(precision: str, mode: str, make: Make, folder: Path) -> dict[str, Any]:
    """30 steps of a task that is easily learned."""
    torch.manual_seed(0)
    module = models.Net()
    with closing(make(precision=precision)) as parallel:
        model, optimizer = parallel.setup(module, torch.optim.AdamW(module.parameters(), lr=3e-2))
        loader = parallel.loader(_line(48), batch_size=16)
        step = parallel.train_step(mse, model, optimizer, clip_norm=1.0)
        losses = []
        for _ in range(10):
            for batch in loader:
                if mode == "step":
                    losses.append(float(step(batch)))
                    continue
                loss = mse(model, batch)
                parallel.backward(loss)
                parallel.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(parallel.gather(loss.detach())))
        parallel.check_lockstep(model)
        dtypes = {str(parameter.dtype) for parameter in module.parameters()}
        return {"losses": losses, "dtypes": dtypes}


def clipped_update(precision: str, clip_norm: float, mode: str, make: Make, folder: Path) -> float:
    """The length of one update of plain SGD with rate 1: the norm of the clipped gradient."""
    torch.manual_seed(0)
    module = models.Net()
    before = torch.cat([parameter.detach().flatten().clone() for parameter in module.parameters()])
    with closing(make(precision=precision)) as parallel:
        model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=1.0))
        (batch,) = parallel.loader(_line(12), batch_size=12)
        if mode == "step":
            parallel.train_step(mse, model, optimizer, clip_norm=clip_norm)(batch)
        else:
            parallel.backward(mse(model, batch))
            parallel.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
        after = torch.cat([parameter.detach().flatten().cpu() for parameter in module.parameters()])
        return float((after - before).norm())


def summed_in(reduce_dtype: str | None, make: Make, folder: Path) -> torch.Tensor:
    """The gradient of one batch, as an update of plain SGD with rate 1 shows it."""
    torch.manual_seed(0)
    module = models.Net()
    before = torch.cat([parameter.detach().flatten().clone() for parameter in module.parameters()])
    with closing(make(reduce_dtype=reduce_dtype)) as parallel:
        model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=1.0))
        (batch,) = parallel.loader(_line(11), batch_size=11)
        parallel.train_step(mse, model, optimizer)(batch)
        parallel.check_lockstep(model)
    return torch.cat([parameter.detach().flatten().cpu() for parameter in module.parameters()]) - before


def overflow(accumulate: int, make: Make, folder: Path) -> dict[str, Any]:
    """fp16 steps of which the third update meets an inf in the last sample only, so on one card's shard."""
    torch.manual_seed(0)
    module = models.Net()
    samples = _line(12 * 5 * accumulate)
    bad = 12 * 3 * accumulate - 1
    samples[bad] = (samples[bad][0], torch.full((3,), float("inf")))
    with closing(make(precision="fp16", accumulate=accumulate)) as parallel:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer = parallel.setup(module, optimizer)
        step = parallel.train_step(mse, model, optimizer, clip_norm=1.0, scheduler=scheduler)
        updated, changed, rates, scales = [], [], [], []
        for batch in parallel.loader(samples, batch_size=12):
            before = [parameter.detach().clone() for parameter in module.parameters()]
            step(batch)
            updated.append(bool(step.updated))
            changed.append(any(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)))
            rates.append(optimizer.param_groups[0]["lr"])
            scales.append(parallel.strategy.precision.scale.value)
        parallel.check_lockstep(model)
        finite = all(bool(parameter.isfinite().all()) for parameter in module.parameters())
        steps = {int(state["step"]) for state in optimizer.state_dict()["state"].values()}
        return {
            "updated": updated,
            "changed": changed,
            "rates": rates,
            "scales": scales,
            "finite": finite,
            "optimizer steps": steps,
        }


def draws(make: Make, folder: Path) -> dict[str, Any]:
    """Dropout masks of every card, twice from one seed and once from another."""
    masks = []
    for seed in (1, 1, 2):
        with closing(make(seed=seed)) as parallel:
            model = parallel.setup(nn.Dropout(0.5).train())
            (batch,) = parallel.loader(TensorDataset(torch.ones(12, 64)), batch_size=12)
            masks.append([(parallel.gather(model(batch[0])) != 0).cpu() for _ in range(2)])
    return {"masks": masks}
