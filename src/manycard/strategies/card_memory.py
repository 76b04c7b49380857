"""What cards hold while a step runs, and what they can hold.

`CardMemory` reads PyTorch's allocator. `SimulatedMemory` gives simulated cards a memory of a chosen size: it counts
what backward passes keep, and raises `torch.OutOfMemoryError` as a GPU would, so that whatever must survive that can
be tried on any machine. ``MANYCARD_SIMULATED_MEMORY=64MiB`` gives every simulated card that much.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manycard.cards import Card, in_words, parse_size
from manycard.engine.batches.batch import tensors_in
from manycard.engine.driving.threads import current_place

__all__ = ["CardMemory", "SimulatedMemory", "is_out_of_memory", "make_card_memory", "state_ratio", "state_to_come"]

LossFn = Callable[[Any, Any], Any]


_SIGNS = ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a card ran out of memory, in PyTorch's allocator or in a library's own."""
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in _SIGNS)


class CardMemory:
    """The memory of real cards.

    Args:
        cards: those of this process.
    """

    def __init__(self, cards: Sequence[Card]) -> None:
        self._cards = tuple(cards)

    def limits(self) -> list[int] | None:
        """Bytes that this process can have on each card; None where there is no limit to keep to."""
        found = []
        for card in self._cards:
            free, _ = torch.cuda.mem_get_info(card.device)
            found.append(free + torch.cuda.memory_reserved(card.device))
        return found

    def reset(self) -> None:
        """Forget the most that was held so far."""
        for card in self._cards:
            torch.cuda.reset_peak_memory_stats(card.device)

    def peaks(self) -> list[int]:
        """The most bytes that each card held since `reset`; waits for the cards."""
        for card in self._cards:
            torch.cuda.synchronize(card.device)
        return [torch.cuda.max_memory_allocated(card.device) for card in self._cards]

    def release(self) -> None:
        """Give back what the allocator keeps in hand."""
        torch.cuda.empty_cache()

    def watched(self, loss_fn: LossFn) -> LossFn:
        """`loss_fn`, counted where that is how memory is known."""
        return loss_fn

    def holds(self, parameters: Iterable[nn.Parameter]) -> None:
        """The model's parameters, which every card holds with their gradients."""


class SimulatedMemory(CardMemory):
    """Memory of simulated cards: parameters, their gradients, and what backward passes keep.

    Args:
        cards: simulated cards.
        size: bytes a card; None for no limit.
    """

    def __init__(self, cards: Sequence[Card], size: int | None) -> None:
        super().__init__(cards)
        self._size = size
        self._base = 0
        self._lock = threading.Lock()
        self._held = [0] * len(self._cards)
        self._peaks = [0] * len(self._cards)

    def limits(self) -> list[int] | None:
        return None if self._size is None else [self._size] * len(self._cards)

    def reset(self) -> None:
        self._peaks = list(self._held)

    def peaks(self) -> list[int]:
        return [self._base + peak for peak in self._peaks]

    def release(self) -> None:
        pass

    def holds(self, parameters: Iterable[nn.Parameter]) -> None:
        self._base = 2 * sum(parameter.nbytes for parameter in parameters)

    def watched(self, loss_fn: LossFn) -> LossFn:
        if self._size is None:
            return loss_fn

        def counted(model: Any, batch: Any) -> Any:
            place = current_place()
            position = 0 if place is None else place.position
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: self._keep(tensor, position), _give):
                loss = loss_fn(model, batch)
            self._check(position)  # and not in the hook, which autograd calls half-way through an operator
            return loss

        return counted

    def _check(self, position: int) -> None:
        needed = self._base + self._held[position]
        if self._size is not None and needed > self._size:
            raise torch.OutOfMemoryError(
                f"simulated card {position} has {in_words(self._size)}, and {in_words(needed)} are needed"
            )

    def _keep(self, tensor: Tensor, position: int) -> _Kept:
        # Parameters, and their transposes, are counted once, in the base.
        whole = tensor if tensor._base is None else tensor._base
        size = 0 if whole.is_leaf and whole.requires_grad else tensor.nbytes
        self._move(position, size)
        # Detached: an operator that keeps its own output would otherwise keep itself, in a graph that nobody uses.
        return _Kept(tensor.detach(), lambda: self._move(position, -size))

    def _move(self, position: int, size: int) -> None:
        with self._lock:
            self._held[position] += size
            self._peaks[position] = max(self._peaks[position], self._held[position])


class _Kept:
    """A tensor that a backward pass keeps, which is given back when that is done with it."""

    def __init__(self, tensor: Tensor, give_back: Callable[[], None]) -> None:
        self.tensor = tensor
        self._give_back = give_back

    def __del__(self) -> None:
        self._give_back()


def _give(kept: _Kept) -> Tensor:
    return kept.tensor


def make_card_memory(cards: Sequence[Card]) -> CardMemory:
    """The memory of these cards.

    Raises:
        CardsError: MANYCARD_SIMULATED_MEMORY is no amount of memory.
    """
    if not cards[0].simulated:
        return CardMemory(cards)
    given = os.environ.get("MANYCARD_SIMULATED_MEMORY")
    return SimulatedMemory(cards, parse_size(given, setting="MANYCARD_SIMULATED_MEMORY") if given else None)


def state_ratio(optimizer: Optimizer) -> float:
    """Bytes of state that the optimizer keeps for each byte of parameters, tried on one small parameter.

    Adam has 2, SGD with momentum 1. One that can't be tried so counts as 2, which errs on the safe side.
    """
    parameter = nn.Parameter(torch.zeros(16, 16))
    first = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    parameter.grad = torch.ones_like(parameter)
    try:
        made = type(optimizer)([{**first, "params": [parameter]}], **optimizer.defaults)
        made.step()
    except Exception:
        return 2.0
    held = [tensor for tensor in tensors_in(list(made.state[parameter].values())) if tensor.numel() > 1]
    return sum(tensor.nbytes for tensor in held) / parameter.nbytes


def state_to_come(optimizers: Iterable[Optimizer]) -> int:
    """Bytes of state that optimizers have yet to make, in their first step."""
    total = 0.0
    for optimizer in optimizers:
        new = [p for group in optimizer.param_groups for p in group["params"] if p not in optimizer.state]
        if new:
            total += state_ratio(optimizer) * sum(parameter.nbytes for parameter in new)
    return round(total)
