"""What a pass that failed must leave as it was, for it to be tried again: buffers and random states.

Behaviour:
    * `note` remembers the module's buffers and all random states: Python's, NumPy's, PyTorch's and the cards'.
    * `restore` puts them back, also where forward has put another tensor in a buffer's place. Attributes that forward
      writes on Python objects (a count of batches) stay as they are.
    * Copies of buffers are used again from step to step; nothing waits for a card.
"""

from __future__ import annotations

import operator
import random

import numpy as np
import torch
from torch import Tensor, nn

from manycard.strategies.strategy import Strategy

__all__ = ["Before"]


class Before:
    """Buffers and random states of one model, as they were at `note`.

    Args:
        strategy: how the work is spread; its generators are the cards'.
        model: what `Parallel.setup` returned.
    """

    def __init__(self, strategy: Strategy, model: nn.Module) -> None:
        self._strategy, self._module = strategy, strategy.unwrap(model)
        self._places = [
            (part._buffers, name)
            for part in self._module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        self._buffers: list[Tensor] = []
        self._copies: list[Tensor] = []
        self.note()

    def note(self) -> None:
        """Remember everything as it is now; of buffers, those that there were when this was made."""
        self._held = [(table, name, buffer) for table, name in self._places if (buffer := table.get(name)) is not None]
        buffers = [buffer for _, _, buffer in self._held]
        same = len(buffers) == len(self._buffers) and all(map(operator.is_, buffers, self._buffers))
        if same and all(copy.shape == buffer.shape for copy, buffer in zip(self._copies, buffers, strict=True)):
            _copy(self._copies, self._buffers)
        else:
            self._buffers, self._copies = buffers, [buffer.detach().clone() for buffer in buffers]
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._host, self._cards = torch.get_rng_state(), self._strategy.generators.state_dict()

    def restore(self) -> None:
        """Put everything back as it was."""
        _copy(self._buffers, self._copies)
        for table, name, buffer in self._held:
            table[name] = buffer
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._host)
        self._strategy.generators.load_state_dict(self._cards)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)
