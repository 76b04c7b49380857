"""The same training in plain PyTorch on one card: the truth that strategies are compared with.

Two loops: `train_in_groups` takes the gradient of a group of micro-batches as the mean over all its samples,
as `step` promises; `train_in_loop` is the loop people write, which divides each loss by the group's size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from .cases import STEPS, Case

__all__ = ["Outcome", "Setting", "default_dtype", "outcome", "prepare", "train_in_groups", "train_in_loop"]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new tensors have `dtype` inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class Outcome:
    """What a training left."""

    losses: list[float]
    tensors: dict[str, Tensor]
    """Parameters and buffers by name, and optimizer states."""
    without_grad: list[str]
    """Parameters that never got a gradient in any step."""
    learning_rates: list[float]
    """Of every parameter group, at the end."""


@dataclass
class Setting:
    """What a case needs, made anew for each run and equal in all of them."""

    model: nn.Module
    optimizers: list[Optimizer]
    scheduler: Any
    samples: list[Any]


def prepare(case: Case, dtype: torch.dtype, device: str = "cpu") -> Setting:
    """Make a case's model, optimizers and samples; the model is on `device`, the samples in host memory."""
    with default_dtype(dtype):
        torch.manual_seed(7)
        model = case.make_model()
        samples = case.make_samples(case.samples)
    optimizers = case.make_optimizers(model.to(device))
    scheduler = case.make_scheduler(optimizers[0]) if case.make_scheduler else None
    return Setting(model, optimizers, scheduler, samples)


def outcome(setting: Setting, losses: list[float], got_grad: set[str]) -> Outcome:
    """Collect what a run left in `setting`."""
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in setting.model.named_parameters()}
    tensors |= {name: tensor.detach().cpu().clone() for name, tensor in setting.model.named_buffers()}
    for number, optimizer in enumerate(setting.optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                if value is not None:
                    tensors[f"optimizer {number}: {index}.{key}"] = torch.as_tensor(value).detach().cpu().clone()
    names = [name for name, _ in setting.model.named_parameters() if name not in got_grad]
    rates = [float(group["lr"]) for optimizer in setting.optimizers for group in optimizer.param_groups]
    return Outcome(losses, tensors, names, rates)


def with_grad(model: nn.Module) -> set[str]:
    """The names of parameters that hold a gradient now."""
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None}


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to(part, device) for key, part in value.items()}
    return type(value)(_to(part, device) for part in value)


def _epochs(case: Case, setting: Setting) -> Iterator[list[Any]]:
    """Epochs of global batches, `STEPS` batches in all."""
    given = 0
    device = next(setting.model.parameters()).device
    while given < STEPS:
        epoch = [_to(batch, device) for batch in DataLoader(setting.samples, case.batch_size)][: STEPS - given]
        given += len(epoch)
        yield epoch


def _update(case: Case, setting: Setting) -> set[str]:
    """Clip, update, step the schedule, drop gradients; which parameters had one."""
    if case.clip_norm is not None:
        clip_grad_norm_([p for o in setting.optimizers for g in o.param_groups for p in g["params"]], case.clip_norm)
    for optimizer in setting.optimizers:
        optimizer.step()
    if setting.scheduler is not None:
        setting.scheduler.step()
    had = with_grad(setting.model)
    for optimizer in setting.optimizers:
        optimizer.zero_grad()
    return had


def train_in_groups(case: Case, dtype: torch.dtype, device: str = "cpu") -> Outcome:
    """Each group of micro-batches updates by the mean over all its samples, or its whole count."""
    setting = prepare(case, dtype, device)
    losses: list[float] = []
    had: set[str] = set()
    for epoch in _epochs(case, setting):
        for start in range(0, len(epoch), case.accumulate):
            sums, counts = [], []
            for batch in epoch[start : start + case.accumulate]:
                total, count = _sum_and_count(case.loss_fn(setting.model, batch), batch)
                losses.append(float(total.detach()) / float(count))
                sums.append(total)
                counts.append(count)
            (sum(sums) / sum(counts)).backward()
            had |= _update(case, setting)
    return outcome(setting, losses, had)


def train_in_loop(case: Case, dtype: torch.dtype, device: str = "cpu") -> Outcome:
    """Each loss is divided by the number of micro-batches of a full group, whatever it holds."""
    setting = prepare(case, dtype, device)
    losses: list[float] = []
    had: set[str] = set()
    for epoch in _epochs(case, setting):
        for index, batch in enumerate(epoch):
            loss = case.loss_fn(setting.model, batch)
            losses.append(loss.item())
            (loss / case.accumulate).backward()
            if (index + 1) % case.accumulate == 0 or index + 1 == len(epoch):
                had |= _update(case, setting)
    return outcome(setting, losses, had)


def _sum_and_count(value: Any, batch: Any) -> tuple[Tensor, Any]:
    if isinstance(value, tuple):
        return value
    count = _samples(batch)
    return value * count, count


def _samples(batch: Any) -> int:
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return len(batch)
