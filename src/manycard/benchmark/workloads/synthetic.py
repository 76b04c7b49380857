"""Workloads whose data is made up: batches drawn once, kept on the card, and used in turn.

Behaviour:
    * Every process draws the same global batches on the CPU and keeps its own shard of each on its card, so the
      clock sees computing and communication, and no loading.
    * A strategy with one process for all cards gets the whole global batch on the primary card and sends the
      other cards their shards, as `nn.DataParallel` does. That copy is part of what is timed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from itertools import cycle
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from manycard.benchmark.workloads.workload import Feeding, Workload
from manycard.engine.batches.sizes import shard_sizes

if TYPE_CHECKING:
    from manycard.parallel import Parallel

__all__ = ["SyntheticWorkload"]


class SyntheticWorkload(Workload):
    """A workload that is measured in steps on drawn batches."""

    different_batches: ClassVar[int] = 2
    """Few, because they stay on the card: 512 images of 224 x 224 are 308 MB in fp32."""

    @abstractmethod
    def draw(self, samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one global batch, on the CPU; both have `samples` as their first size."""

    def batches(self, parallel: Parallel, feeding: Feeding) -> Iterator[tuple[Any, int]]:
        shards = [self._shard(parallel, feeding, number) for number in range(self.different_batches)]
        for shard in cycle(shards):
            yield shard, feeding.batch

    def _shard(self, parallel: Parallel, feeding: Feeding, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(feeding.seed * self.different_batches + number)
        inputs, targets = self.draw(feeding.batch, generator)
        sizes = shard_sizes(feeding.batch, parallel.world_size)
        start = sum(sizes[: parallel.rank])
        mine = slice(start, start + sizes[parallel.rank])
        return inputs[mine].to(parallel.device), targets[mine].to(parallel.device)
