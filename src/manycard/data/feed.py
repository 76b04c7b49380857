"""What a step needs to know about the batch it is given and can't see in it.

A loader made by `Parallel.loader` writes here as it hands out each batch; `step`, `backward` and `gather` read
it. A batch that came from elsewhere is counted by its tensors instead.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BatchInfo", "Feed"]


@dataclass(frozen=True)
class BatchInfo:
    """One batch as it was handed out in this process."""

    held: int
    """Samples in the tensors that were handed out."""
    samples: int
    """Samples that count. 0 where a rank got a stand-in because the global batch has fewer samples than there
    are ranks: it takes part in every collective and adds nothing."""
    last: bool
    """Whether this is the last batch of the epoch."""


class Feed:
    """The newest batch of any of this process's loaders; None before the first and after an epoch's end."""

    def __init__(self) -> None:
        self.current: BatchInfo | None = None

    def samples(self, held: int) -> int:
        """How many of the `held` samples in a batch's tensors count.

        A count that differs from the one handed out means that the script made the batch itself.
        """
        info = self.current
        return info.samples if info is not None and info.held == held else held

    def ends_epoch(self, held: int) -> bool:
        """Whether a batch with `held` samples in its tensors is the newest one and ends its epoch."""
        info = self.current
        return info is not None and info.held == held and info.last
