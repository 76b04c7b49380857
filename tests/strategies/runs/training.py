"""The training cases, through `train_step` and through the loop that users of other libraries write."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch

from ..cases import STEPS, Case
from ..reference import Outcome, outcome, prepare, with_grad
from .making import Make, closing


def train_by_step(case: Case, dtype: torch.dtype, make: Make, folder: Path) -> Outcome:
    """A case through `train_step`."""
    setting = prepare(case, dtype)
    with closing(make(accumulate=case.accumulate, **case.options)) as parallel:
        model, *optimizers = parallel.setup(setting.model, *setting.optimizers)
        loader = parallel.loader(setting.samples, batch_size=case.batch_size)
        step = parallel.train_step(
            case.loss_fn, model, optimizers, clip_norm=case.clip_norm, scheduler=setting.scheduler
        )
        losses: list[float] = []
        had: set[str] = set()
        while len(losses) < STEPS:
            for batch in loader:
                losses.append(float(step(batch)))
                had |= with_grad(setting.model) if step.updated else set()
        parallel.check_lockstep(model)
        return outcome(setting, losses, had)


def train_by_loop(case: Case, dtype: torch.dtype, make: Make, folder: Path) -> Outcome:
    """A case through the loop that users of other libraries write."""
    setting = prepare(case, dtype)
    with closing(make(**case.options)) as parallel:
        model, *optimizers = parallel.setup(setting.model, *setting.optimizers)
        loader = parallel.loader(setting.samples, batch_size=case.batch_size)
        losses: list[float] = []
        had: set[str] = set()
        while len(losses) < STEPS:
            for index, batch in enumerate(loader):
                ends = (index + 1) % case.accumulate == 0 or index + 1 == len(loader)
                with nullcontext() if ends else parallel.no_sync(model):
                    loss = case.loss_fn(model, batch)
                    parallel.backward(loss / case.accumulate)
                losses.append(float(parallel.gather(loss.detach())))
                if not ends:
                    continue
                if case.clip_norm is not None:
                    parallel.clip_grad_norm_(model.parameters(), case.clip_norm)
                for optimizer in optimizers:
                    optimizer.step()
                if setting.scheduler is not None:
                    setting.scheduler.step()
                had |= with_grad(setting.model)
                for optimizer in optimizers:
                    optimizer.zero_grad()
        parallel.check_lockstep(model)
        return outcome(setting, losses, had)
