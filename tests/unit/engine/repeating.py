"""A recorder that runs on the CPU, for tests of the bookkeeping around CUDA graphs.

`Repeating` keeps a function and runs it again for a replay, into the tensors of the first run. It shows what is
written where, in which order and when; what only a graph does (constants that stay) is shown on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manycard.engine.batches.batch import tensors_in
from manycard.engine.recording.recorder import Recorder


class Repeating(Recorder):
    """Records by keeping a function.

    Args:
        protected: gives what a first run must leave as it is.
        parameters: gives those whose gradients are None or not in a replay as they were in the first run.
    """

    def __init__(
        self, protected: Callable[[], list[Tensor]], parameters: Callable[[], Sequence[nn.Parameter]] = list
    ) -> None:
        self.recordings = 0
        self.replayed: list[int] = []
        """The number of each recording that was replayed."""
        self._protected = protected
        self._parameters = parameters

    @property
    def replays(self) -> int:
        """How many replays there were."""
        return len(self.replayed)

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        kept = [(tensor, tensor.detach().clone()) for tensor in self._protected()]
        gradients = [(parameter, parameter.grad) for parameter in self._parameters()]
        state = torch.get_rng_state()
        value = work()
        torch.set_rng_state(state)
        for tensor, before in kept:
            tensor.data.copy_(before)
        number = self.recordings
        self.recordings += 1

        def replay() -> None:
            self.replayed.append(number)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for target, source in zip(tensors_in(value), tensors_in(work()), strict=True):
                target.data.copy_(source)

        return replay, value
