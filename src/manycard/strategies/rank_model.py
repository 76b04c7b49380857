"""What a script calls in a rank of strategy ``ddp``, and how it reaches DistributedDataParallel."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from manycard.engine.batches.batch import tensors_in
from manycard.engine.calls.belonging import is_reentrant_checkpoint, nodes_of
from manycard.errors import SettingError
from manycard.strategies.peers import Peers

if TYPE_CHECKING:
    from manycard.strategies.ddp import DistributedStrategy

__all__ = ["RankModel"]


class RankModel(nn.Module):
    """What a script calls in a rank: the module, reached through DistributedDataParallel.

    Attributes, methods and ``state_dict`` are the module's own.
    """

    syncs: bool
    """Whether backward passes reduce; False inside ``no_sync``."""

    def __init__(self, module: nn.Module, strategy: DistributedStrategy) -> None:
        super().__init__()
        self.module = module
        # Hidden from nn.Module, so that parameters and state keys stay the module's.
        self.__dict__["syncs"] = True
        self.__dict__["_strategy"] = strategy
        strategy.peers.broadcast(module.parameters())
        strategy.settle(self)
        self._make_reducer()

    def _make_reducer(self) -> None:
        strategy: DistributedStrategy = self.__dict__["_strategy"]
        call = _Call(self.module, strategy.peers)
        reducer = _make_reducer(call, strategy.options.ddp)
        if strategy.options.reduce_dtype is not None and isinstance(reducer, DistributedDataParallel):
            reducer.register_comm_hook(None, bf16_compress_hook)
        self.__dict__["call"] = call
        self.__dict__["reducer"] = call.__dict__["reducer"] = reducer
        self.__dict__["_made_for"] = self._trainable()

    def _trainable(self) -> list[int]:
        return [id(parameter) for parameter in self.module.parameters() if parameter.requires_grad]

    def follow(self) -> None:
        """Make DDP anew when the script has frozen, unfrozen or replaced parameters: it knows those at its making."""
        if self._trainable() != self.__dict__["_made_for"]:
            self._make_reducer()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output for this rank's shard."""
        strategy: DistributedStrategy = self.__dict__["_strategy"]
        strategy.note_call(self, (args, kwargs))
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        self.follow()
        with strategy.counting():
            return self.reducer(_call_module, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def _make_reducer(call: _Call, options: dict[str, Any]) -> nn.Module:
    """DistributedDataParallel round a module; nothing round one that has no gradients to reduce."""
    module = call.module
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return call
    # Buffers are settled by the strategy. The argument that says so was renamed after torch 2.11.
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    chosen = {"find_unused_parameters": True, "gradient_as_bucket_view": True, **options}
    chosen.setdefault("forward_sync_buffers" if renamed else "broadcast_buffers", False)
    if chosen["find_unused_parameters"]:
        device = next(module.parameters()).device
        call.anchor = nn.Parameter(torch.zeros(1, device=device, dtype=next(module.parameters()).dtype))
    try:
        return DistributedDataParallel(call, **chosen)
    except TypeError as error:
        raise SettingError(
            "ddp_options", options, str(error), fix="give arguments of DistributedDataParallel"
        ) from error


class _Call(nn.Module):
    """A module whose forward pass is whatever function of it is given."""

    anchor: nn.Parameter | None

    def __init__(self, module: nn.Module, peers: Peers) -> None:
        super().__init__()
        self.module = module
        self.anchor = None
        self._peers = peers
        self.__dict__["reducer"] = None
        self.reduces_after = any(getattr(part, "sparse", False) is True for part in module.modules())
        """Whether gradients are reduced after backward, because DDP can't do it meanwhile."""
        self._looked = False

    def forward(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """The function's value; DDP arms its reduction after this has returned."""
        value = self.no_loss() if function is None else function(self.module, *args, **kwargs)
        reducer = self.reducer
        if not isinstance(reducer, DistributedDataParallel):
            return value
        if not self._looked and torch.is_grad_enabled():
            self._looked = True
            roots = [tensor.grad_fn for tensor in tensors_in(value) if tensor.grad_fn is not None]
            found = self.reduces_after or any(map(is_reentrant_checkpoint, nodes_of(roots)))
            self.reduces_after = bool(self._peers.total(found))  # on one rank is enough for all
        if self.reduces_after:
            reducer.require_backward_grad_sync = False
        return value

    def no_loss(self) -> Tensor:
        """A loss of 0; every parameter but the anchor counts as unused on this rank."""
        if self.anchor is not None:
            return self.anchor.sum() * 0
        return torch.stack([p.sum() for p in self.module.parameters() if p.requires_grad]).sum() * 0


def _call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)
