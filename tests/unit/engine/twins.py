"""A module alone on one card in plain PyTorch, and its twin in `mc.DataParallel`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manycard as mc

Module = TypeVar("Module", bound=nn.Module)

CARDS = [1, 2, 3, 4]


def spread(module: nn.Module, cards: int = 3, **options: Any) -> Any:
    """`module` on that many simulated cards."""
    return mc.DataParallel(module, device_ids=f"cpu:{cards}", **options)


def twins(make: Callable[[], Module], cards: int = 3, **options: Any) -> tuple[Module, Any]:
    """A fp64 module alone, and an equal one spread over cards."""
    made = []
    for _ in range(2):  # no deep copy: old reparametrizations can't be copied
        torch.manual_seed(0)
        made.append(make().double())
    return made[0], spread(made[1], cards, **options)


def close(actual: Any, expected: Any, name: str = "") -> None:
    """Equal to 1e-9, structure and types included."""
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=lambda text: f"{name}: {text}")


def same_state(alone: nn.Module, together: Any, buffers: bool = True) -> None:
    """Parameters, their gradients and buffers are equal."""
    for (name, mine), (other, theirs) in zip(alone.named_parameters(), together.module.named_parameters(), strict=True):
        assert name == other
        close(theirs.detach(), mine.detach(), name)
        assert (mine.grad is None) == (theirs.grad is None), f"{name}.grad: {mine.grad} and {theirs.grad}"
        if mine.grad is not None:
            close(theirs.grad, mine.grad, f"{name}.grad")
    if buffers:
        for (name, mine), (_, theirs) in zip(alone.named_buffers(), together.module.named_buffers(), strict=True):
            close(theirs, mine, name)


def batch(samples: int, features: int = 6, seed: int = 1) -> Tensor:
    """Random fp64 rows."""
    return torch.randn(samples, features, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def grads(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Copies of the gradients."""
    return [parameter.grad.clone() for parameter in parameters]


def ordinary_loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Tensor]) -> list[Tensor]:
    """The loop people write; the losses. A batch's first three columns are its targets."""
    losses = []
    for step, x in enumerate(batches):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        y = model(x)
        loss = F.mse_loss(y, x[:, :3].to(y.device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def train(alone: Any, together: Any, steps: int = 3) -> None:
    """A few steps of both, comparing all outputs and all that is left."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (alone, together)]
    for step in range(steps):
        outs = []
        for model, optimizer in zip((alone, together), optimizers, strict=True):
            optimizer.zero_grad()
            y = model(batch(7, seed=step))
            y.square().mean().backward()
            optimizer.step()
            outs.append(y.detach())
        close(outs[1], outs[0])
    same_state(alone, together)
