"""What the processes of a run tell one another: a base that is one process alone, and ranks of torch.distributed.

Behaviour:
    * Alone, nothing travels: what is asked comes back as it was given.
    * Every rank makes the same calls in the same order; each call waits until all ranks have made it.
    * A rank with a stand-in for an empty shard takes part as any other, and what it gives weighs nothing.
    * Sums of numbers are made in fp64 on the rank's card, and the host doesn't wait for them.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manycard.cards.card import Card
from manycard.data.feed import Feed
from manycard.engine.batches.batch import map_tensors

__all__ = ["Peers", "Ranks"]


class Peers:
    """One process, alone."""

    @property
    def rank(self) -> int:
        """Which process this is; 0 prints, logs and writes."""
        return 0

    @property
    def world_size(self) -> int:
        """How many processes the run has."""
        return 1

    def barrier(self) -> None:
        """Wait until every process is here."""

    def total(self, value: float) -> float | Tensor:
        """The sum of every process's `value`: the number itself, or 0-dim on this rank's card."""
        return value

    def largest(self, value: int) -> int:
        """The largest of every process's `value`, known on the host."""
        return value

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by its sum over processes, and return it."""
        return tensor

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace gradients by their mean over processes; None counts as 0, and stays where it is None in all."""

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Write rank 0's values into every process's `tensors`."""

    def gather(self, value: Any, feed: Feed) -> Any:
        """Join every process's shard of `value` in the global batch's order; 0-dim tensors become means.

        Args:
            value: any nesting of tensors: (rows of the shard, ...), or 0-dim.
            feed: how many of this process's rows count, and with which weight its 0-dim tensors do.
        """
        return value

    def gather_objects(self, value: Any) -> list[Any]:
        """Every process's `value`, by rank."""
        return [value]


class Ranks(Peers):
    """One rank of several, over torch.distributed's default group, which is made where there is none yet.

    Args:
        card: this rank's card.
    """

    def __init__(self, card: Card) -> None:
        self._device = card.device
        if dist.is_initialized():
            return
        if card.simulated:
            dist.init_process_group("gloo")
        else:
            torch.cuda.set_device(card.device)
            dist.init_process_group("nccl", device_id=card.device)
        # One group serves every Parallel of the process: a second one can't be made once it is gone.
        atexit.register(_leave_group)

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    def barrier(self) -> None:
        dist.barrier()

    def total(self, value: float) -> Tensor:
        return self.all_reduce(torch.tensor(float(value), dtype=torch.float64, device=self._device))

    def largest(self, value: int) -> int:
        found = torch.tensor(value, dtype=torch.int64, device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return int(found)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        used = self.all_reduce(torch.tensor([float(p.grad is not None) for p in trainable], device=self._device))
        for parameter, users in zip(trainable, used.tolist(), strict=True):
            if users:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self._average(gradient)

    def _average(self, gradient: Tensor) -> Tensor:
        if not any(self.gather_objects(gradient.is_sparse)):
            return self.all_reduce(gradient.contiguous()) / self.world_size
        rows = gradient.coalesce() if gradient.is_sparse else gradient.to_sparse(1)
        parts: list[Tensor] = self.gather_objects(rows.cpu())
        total = sum(parts[1:], start=parts[0])
        return (total / self.world_size).coalesce().to(self._device)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            own = tensor.data
            sent = own.contiguous()  # NCCL takes nothing else
            dist.broadcast(sent, 0)
            if sent is not own:
                own.copy_(sent)

    def gather(self, value: Any, feed: Feed) -> Any:
        return map_tensors(lambda tensor: self._gather_tensor(tensor, feed), value)

    def _gather_tensor(self, tensor: Tensor, feed: Feed) -> Tensor:
        tensor = tensor.detach().to(self._device)
        if tensor.dim() == 0:
            own = feed.current.samples if feed.current is not None else 1
            numbers = self.all_reduce(torch.stack([tensor.double() * own, tensor.new_tensor(own, dtype=torch.float64)]))
            return (numbers[0] / numbers[1]).to(tensor.dtype)
        rows = feed.samples(tensor.size(0))
        counts: Sequence[int] = self.gather_objects(rows)
        padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
        padded[:rows] = tensor[:rows]
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def gather_objects(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
