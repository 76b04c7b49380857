"""Activation checkpoints: a part keeps its inputs only, and its backward pass computes the rest again.

Behaviour:
    * What the second forward pass draws is what the first one drew (PyTorch's checkpoints see to that).
    * What it writes into buffers (running statistics of BatchNorm, a counter) is put back: forward has written it
      already, and a batch counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["checkpointed"]


def checkpointed(module: nn.Module, work: Callable[..., Any]) -> Callable[..., Any]:
    """`work`, the forward pass of `module`, with its activations computed again in backward."""

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _buffers_kept(module)

    if next(module.buffers(), None) is None:
        return partial(checkpoint, work, use_reentrant=False)
    return partial(checkpoint, work, use_reentrant=False, context_fn=contexts)


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Put the buffers back at the end. By ``.data``: a graph may have saved them, and minds that they are written."""
    held = [
        (part._buffers, name, buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for place, name, buffer, kept in held:
                buffer.data.copy_(kept)
                place[name] = buffer
