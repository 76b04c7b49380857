"""What a training computes, counted without any card: operators, bytes, and memory for a backward pass.

The module and the batch are put on PyTorch's meta device, where tensors have shapes and no values, so that a model of
any size is counted in seconds. A training that reads values (``.item()``) is counted on the CPU, on few samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from manycard.engine.batches.batch import count_samples, map_tensors, tensors_in
from manycard.engine.steps.loss import read_loss
from manycard.planner.card_models import Operator

__all__ = ["Counted", "count_step", "largest_part_mib", "tensors_mib"]

_MIB = 2**20


@dataclass(frozen=True)
class Counted:
    """One forward and backward pass."""

    operators: tuple[Operator, ...]
    activations_mib: float
    """What is kept for the backward pass, beside parameters; fp32."""
    output_mib: float
    """What the module returned."""
    samples: int = 1
    """In the batch that was counted."""


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the work of every operator that computes something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.is_view or func.namespace == "prim" or func._schema.name in _FREE:
            return out
        count = flop_registry.get(func._overloadpacket)
        operations = float(count(*args, **kwargs, out_val=out)) if count is not None else 0.0
        moved = sum(t.nbytes for t in tensors_in([*args, *kwargs.values(), out]))
        self.operators.append((operations, float(moved)))
        return out


_FREE = {"aten::detach", "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::_unsafe_view"}


def count_step(loss_fn: Callable[[Any, Any], Any], module: nn.Module, batch: Any) -> Counted:
    """Count one forward and backward pass of a copy of `module`.

    Raises:
        Exception: whatever the loss raises on the CPU.
    """
    try:
        return _count(loss_fn, _on_meta(module), map_tensors(_meta, batch))
    except Exception:
        # Meta tensors have no values: a loss that reads one, or an operator without a shape rule, ends here.
        return _count(loss_fn, copy.deepcopy(module).cpu(), map_tensors(lambda tensor: tensor.cpu(), batch))


def _on_meta(module: nn.Module) -> nn.Module:
    # Copied without its values: parameters of the copy are made on the meta device from the start.
    made: dict[int, Tensor] = {id(t): nn.Parameter(_meta(t), t.requires_grad) for t in module.parameters()}
    made |= {id(t): _meta(t) for t in module.buffers()}
    found: nn.Module = copy.deepcopy(module, dict(made))
    return found


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.detach(), device="meta")


def _count(loss_fn: Callable[[Any, Any], Any], module: nn.Module, batch: Any) -> Counted:
    outputs: list[float] = []
    kept: dict[int, float] = {}
    own = {_storage(tensor) for tensor in [*module.parameters(), *module.buffers(), *tensors_in(batch)]}
    alive: list[Any] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage not in own and storage not in kept:
            alive.append(tensor.untyped_storage())  # so that no other tensor takes its place
            kept[storage] = tensor.untyped_storage().nbytes() / _MIB
        return tensor

    hook = module.register_forward_hook(lambda _, __, out: outputs.append(tensors_mib(out)))
    counting = _Counting()
    try:
        with counting, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            read_loss(loss_fn(module, batch)).value.backward()  # type: ignore[no-untyped-call]
    finally:
        hook.remove()
    samples = count_samples(batch)
    return Counted(tuple(counting.operators), sum(kept.values()), max(outputs, default=0.0), samples)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def tensors_mib(value: Any) -> float:
    """MiB of all tensors in a nesting."""
    return sum(tensor.nbytes for tensor in tensors_in(value)) / _MIB


def largest_part_mib(module: nn.Module) -> float:
    """Parameters of the largest block: of a list's items where the module has any, else of its children."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential) and len(part) > 1]
    parts = [block for each in lists for block in each] or list(module.children()) or [module]
    return max(sum(p.nbytes for p in part.parameters()) / _MIB for part in parts)
