"""Noticing that the ranks' scripts have drifted apart.

Every rank runs the whole script, and what one does in lockstep with the others is right only as long as all do the
same. They may not: a script that draws from a generator seeded by the time or by the operating system gets another
batch in every rank.

Behaviour:
    * At the first calls of a module and then at every 64th, ranks compare a fingerprint of the call's inputs and of
      the module's parameters. Whole numbers must be equal; others may differ by rounding, since an operation outside
      of the module may add up in another order each time.
    * A rank whose script has ended waits for the others, and notices when one has gone on to a call that it will
      never make.
    * Either raises LockstepError in every rank that notices, with the module and the number of the call.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from manycard.engine.batches.batch import tensors_in
from manycard.errors import BatchError, LockstepError
from manycard.strategies.peers import Peers

__all__ = ["CallCounts", "check_lockstep", "is_due"]

_FIX = "seed every generator that the script makes (not by the time), or use --strategy dp, where the script runs once"
_SAMPLED = 4096
"""Elements of a tensor that a fingerprint looks at."""
_OF_PARAMETER = 8
"""Elements of a parameter that it looks at."""
_ROUNDING = 1e-4
"""Relative; far less than between two batches, far more than sums in another order differ by."""
_PERIOD = 0.02


def is_due(calls: int) -> bool:
    """Whether call number `calls` of a module is compared, from 0."""
    return calls < 4 or calls % 64 == 0


def check_lockstep(module: nn.Module, batch: Any, calls: int, peers: Peers, device: torch.device) -> None:
    """Compare one call of every rank.

    Args:
        module: what is called.
        batch: ``(args, kwargs)``.
        calls: how often it was called before.

    Raises:
        LockstepError: the calls differ.
    """
    mine = _fingerprint(module, batch, calls)
    of_ranks = torch.stack([torch.tensor(mine, dtype=torch.float64), -torch.tensor(mine, dtype=torch.float64)])
    highest, lowest = _most(of_ranks.to(device), peers)
    for what, place, scale in (("call", 0, None), ("inputs", 1, None), ("inputs", 2, 3), ("parameters", 4, 5)):
        gap = highest[place] - lowest[place]
        if gap > (0.0 if scale is None else _ROUNDING * highest[scale]):
            name = type(module).__name__
            raise LockstepError(f"the ranks' scripts have drifted apart: {_found(what, name, calls)}", fix=_FIX)


def _found(what: str, name: str, calls: int) -> str:
    if what == "call":
        return f"call {calls + 1} of {name} is not the same call in every rank"
    return f"in call {calls + 1} of {name} the {what} differ between ranks"


def _most(of_ranks: Tensor, peers: Peers) -> tuple[list[float], list[float]]:
    """The highest and the lowest of each number over ranks, of [2, n]: the numbers, and their negatives."""
    torch.distributed.all_reduce(of_ranks, op=torch.distributed.ReduceOp.MAX)
    highest, lowest = of_ranks.tolist()
    return highest, [-value for value in lowest]


def _fingerprint(module: nn.Module, batch: Any, calls: int) -> list[float]:
    """Which call it is; the whole numbers; the others and their size; the parameters and their size."""
    tensors: list[Tensor] = []
    with contextlib.suppress(BatchError):  # what can't be cut is not looked into
        tensors.extend(tensors_in(batch))
    call = (type(module).__qualname__, calls, [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors])
    exact, content, size = zlib.crc32(repr(call).encode()), 0.0, 0.0
    integers = 0
    for number, tensor in enumerate(tensors, start=1):
        values = _sampled(tensor)
        if tensor.is_floating_point() or tensor.is_complex():
            values = torch.view_as_real(values).flatten() if values.is_complex() else values
            values = values.double().nan_to_num(posinf=1.0, neginf=-1.0)
            weights = torch.cos(torch.arange(len(values), dtype=torch.float64, device=values.device) + number)
            content += float(values @ weights)
            size += float(values.abs().sum())
        else:
            integers = zlib.crc32(values.cpu().to(torch.int64).numpy().tobytes(), integers)
    return [float(exact), float(integers), content, size, *_content_of(module)]


def _sampled(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.reshape(-1)
    step = max(1, len(flat) // _SAMPLED)
    return flat[::step]


def _content_of(module: nn.Module) -> list[float]:
    """A projection of a few elements of every parameter, and their size."""
    parameters = [parameter.detach() for parameter in module.parameters() if not is_lazy(parameter)]
    few = [parameter.reshape(-1)[:_OF_PARAMETER].real.double() for parameter in parameters if parameter.numel()]
    if not few:
        return [0.0, 0.0]
    values = torch.cat(few).nan_to_num(posinf=1.0, neginf=-1.0)
    weights = torch.cos(torch.arange(len(values), dtype=torch.float64, device=values.device))
    return [float(values @ weights), float(values.abs().sum())]


class CallCounts:
    """How many calls each rank has begun, in memory that the ranks of one machine share.

    Args:
        path: a file for it; made where there is none.
        rank: which rank this is.
        world: how many there are.
    """

    def __init__(self, path: Path, rank: int, world: int) -> None:
        self._rank = rank
        self._world = world
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            os.ftruncate(handle, 16 * world)
            self._memory = mmap.mmap(handle, 16 * world)
        finally:
            os.close(handle)
        self._calls = 0

    def begin(self) -> None:
        """This rank begins a call in which it will wait for the others."""
        self._calls += 1
        struct.pack_into("q", self._memory, 16 * self._rank, self._calls)

    def end(self) -> None:
        """This rank's script has ended; wait until all have.

        Raises:
            LockstepError: another rank has begun a call that this one will not make.
        """
        struct.pack_into("q", self._memory, 16 * self._rank + 8, 1)
        while not all(ended for _, ended in self._others()):
            for rank, (calls, ended) in enumerate(self._others()):
                if calls > self._calls and not ended:
                    raise LockstepError(
                        f"the ranks' scripts have drifted apart: the one of rank {self._rank} ended after"
                        f" {self._calls} calls, and that of rank {rank} goes on",
                        fix=_FIX,
                    )
            time.sleep(_PERIOD)

    def _others(self) -> Iterator[tuple[int, bool]]:
        for rank in range(self._world):
            calls, ended = struct.unpack_from("qq", self._memory, 16 * rank)
            yield calls, bool(ended)
