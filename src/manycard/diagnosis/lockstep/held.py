"""What one card or rank holds of a module, by name, as checksums that can be compared with another's.

Names are those of the module itself, without what wrappers put before them, so that cards and ranks are compared by
name and not by place: parameters that two ranks registered in another order are still told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from manycard.engine.replicas.checksum import checksums, nonfinite
from manycard.strategies.rank_model import RankModel

__all__ = ["Held", "Reducer", "named", "read_held", "reducer_of"]


@dataclass(frozen=True)
class Reducer:
    """What averages gradients between ranks, and how it was used last."""

    kind: str
    """``"DistributedDataParallel"``, ``"manycard"``, or ``""`` where nothing does."""
    called: bool = True
    """Whether a forward pass ever went through it."""
    synced: bool = True
    """Whether the newest forward pass through it was outside ``no_sync``."""
    unknown: tuple[str, ...] = ()
    """Parameters that require gradients and that weren't there when it was made."""
    short: int = 0
    """How many more of the others require gradients now than it was made for."""


@dataclass(frozen=True)
class Held:
    """One card's or rank's side of the comparison."""

    place: str
    """``"cuda:1"`` or ``"rank 1"``."""
    order: tuple[str, ...]
    """The names of its parameters, as they are registered."""
    parameters: dict[str, int]
    gradients: dict[str, int | None]
    """None where a parameter has none."""
    buffers: dict[str, int]
    statistics: frozenset[str] = frozenset()
    """Those buffers that are running statistics of BatchNorm."""
    nonfinite: tuple[str, ...] = ()
    """What holds inf or NaN, in words: ``"parameter fc.weight"``."""
    reducer: Reducer | None = None
    sharded: int = 0
    """Parameters of which each rank holds a part only, by design; they are not compared."""
    losses: tuple[bool, ...] = field(default=(), compare=False)
    """Whether each of its newest losses was finite, the newest last."""


def named(module: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
    """A module's parameters that can be compared, with their names."""
    pairs = [(name, p) for name, p in module.named_parameters() if not is_lazy(p) and not _is_sharded(p)]
    return [name for name, _ in pairs], [parameter for _, parameter in pairs]


def read_held(
    place: str,
    module: nn.Module,
    *,
    extra: Iterable[tuple[str, nn.Parameter]] = (),
    gradients: bool = True,
    buffers: bool = True,
    reducer: Reducer | None = None,
) -> Held:
    """Read one side.

    Args:
        place: what to call it.
        module: the module without any wrapper.
        extra: parameters that are not the module's, with a name for each.
        gradients: also gradients.
        buffers: also buffers.
        reducer: what averages its gradients.
    """
    names, parameters = named(module)
    for name, parameter in extra:
        names.append(name)
        parameters.append(parameter)
    trainable = [(name, p.grad) for name, p in zip(names, parameters, strict=True) if p.requires_grad and gradients]
    found = [(name, grad) for name, grad in trainable if grad is not None and not _is_sharded(grad)]
    kept = [(name, b) for name, b in module.named_buffers() if buffers and not _is_sharded(b)]
    labels = [f"parameter {name}" for name in names] + [f"gradient of {name}" for name, _ in found]
    labels += [f"buffer {name}" for name, _ in kept]
    sums, broken = _read([*parameters, *(grad for _, grad in found), *(b for _, b in kept)])
    first, second = len(names), len(names) + len(found)
    read = dict(zip((name for name, _ in found), sums[first:second], strict=True))
    return Held(
        place=place,
        order=tuple(names),
        parameters=dict(zip(names, sums[:first], strict=True)),
        gradients={name: read.get(name) for name, _ in trainable},
        buffers=dict(zip((name for name, _ in kept), sums[second:], strict=True)),
        statistics=frozenset(_statistics(module)),
        nonfinite=tuple(label for label, bad in zip(labels, broken, strict=True) if bad),
        reducer=reducer,
        sharded=sum(_is_sharded(parameter) for parameter in module.parameters()),
    )


def _read(tensors: Sequence[Tensor]) -> tuple[list[int], list[bool]]:
    """Each tensor's checksum, and whether it holds inf or NaN. Waits once for each device."""
    sums: list[int] = [0] * len(tensors)
    broken: list[bool] = [False] * len(tensors)
    devices: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        devices.setdefault(tensor.device, []).append(index)
    for device, indices in devices.items():
        if device.type == "meta":
            continue
        there = [tensors[index] for index in indices]
        answer = torch.stack([checksums(there), nonfinite(there).to(torch.int64)]).cpu().tolist()
        for index, total, bad in zip(indices, *answer, strict=True):
            sums[index], broken[index] = total, bool(bad)
    return sums, broken


def _statistics(module: nn.Module) -> Iterable[str]:
    for prefix, part in module.named_modules():
        if isinstance(part, _BatchNorm):
            yield from (f"{prefix}.{name}" if prefix else name for name in part._buffers)


def _is_sharded(tensor: Tensor) -> bool:
    """Whether it is FSDP's or a tensor-parallel one: each rank holds another part."""
    return type(tensor).__name__ == "DTensor" or hasattr(tensor, "_is_flat_param")


def reducer_of(model: nn.Module) -> Reducer:
    """What averages the gradients of `model`, a DistributedDataParallel or what manycard's ``ddp`` made."""
    ours = isinstance(model, RankModel)
    ddp = model.__dict__["reducer"] if isinstance(model, RankModel) else model
    if not isinstance(ddp, DistributedDataParallel):
        return Reducer("manycard" if ours else "")
    known = {id(parameter) for parameter in ddp._module_parameters}
    names, parameters = named(ddp.module)
    unknown = [name for name, p in zip(names, parameters, strict=True) if p.requires_grad and id(p) not in known]
    made_for = int(ddp._get_ddp_logging_data().get("num_parameter_tensors", 0))  # type: ignore[no-untyped-call]
    trainable = sum(parameter.requires_grad for parameter in ddp._module_parameters)
    return Reducer(
        kind="manycard" if ours else "DistributedDataParallel",
        called=bool(getattr(ddp, "_lazy_init_ran", True)),
        # Forward passes set it; it is what makes the next one broadcast buffers.
        synced=bool(getattr(ddp, "require_forward_param_sync", True)),
        unknown=tuple(name.removeprefix("module.") if ours else name for name in unknown),
        short=trainable - made_for if made_for else 0,
    )
