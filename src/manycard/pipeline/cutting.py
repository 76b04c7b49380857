"""How a batch becomes micro-batches: sizes, as even as can be, and never so small that a layer can't work with them.

A BatchNorm layer that takes statistics from what it is given needs two samples (of one, in PyTorch, it raises). So a
small batch goes through such a model in fewer micro-batches, on fewer replicas.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from manycard.engine.batches.sizes import shard_sizes

__all__ = ["least_samples", "micro_batch_sizes"]


def least_samples(module: nn.Module) -> int:
    """The fewest samples that `module`, in the mode that it is in, can be called with."""
    taken = (isinstance(part, _BatchNorm) and (part.training or part.running_mean is None) for part in module.modules())
    return 2 if any(taken) else 1


def micro_batch_sizes(samples: int, replicas: int, micro_batches: int, least: int) -> list[list[int]]:
    """For each replica that gets any, the sizes of its micro-batches; they differ by one at most within a replica.

    Args:
        samples: of the batch, at least one.
        replicas: how many copies of the model share it.
        micro_batches: of each, where there are enough samples.
        least: of each micro-batch, where the batch has so many.

    Example:
        >>> micro_batch_sizes(9, 2, 4, 1), micro_batch_sizes(9, 2, 4, 2), micro_batch_sizes(3, 2, 4, 2)
        ([[2, 1, 1, 1], [1, 1, 1, 1]], [[3, 2], [2, 2]], [[3]])
    """
    shards = shard_sizes(samples, max(1, min(replicas, samples // least)))
    return [shard_sizes(shard, max(1, min(micro_batches, shard // least))) for shard in shards]
