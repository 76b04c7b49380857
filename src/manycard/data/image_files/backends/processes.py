"""Decoders in worker processes, as under torchvision and PyTorch's DataLoader.

Each batch is cut into one part a worker, interleaved. Workers write into one tensor in shared memory, which is copied
to the batch that is handed out. The interpreter lock is never shared, which pays where there are many cores. Workers
end with the script, also when that is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import torch
import torch.multiprocessing  # teaches multiprocessing to send tensors
from torch import Tensor

from manycard.data.image_files.backends.backend import Backend, DecodedBatch
from manycard.data.image_files.backends.inline import Inline, Writer
from manycard.data.image_files.recipe import Recipe, Request
from manycard.errors import BatchError

__all__ = ["Processes"]


class Processes(Backend):
    """One part of each batch in each worker process."""

    name = "torchvision"

    def __init__(self, recipe: Recipe, workers: int, device: torch.device | None = None) -> None:
        super().__init__(recipe, workers, device)
        self._pool: ProcessPoolExecutor | None = None
        self._shared: Tensor | None = None

    def load(self, requests: Sequence[Request]) -> DecodedBatch:
        if multiprocessing.current_process().daemon:
            # A worker of a DataLoader may not start processes.
            return Inline(self.recipe, 1).load(requests)
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self.workers, initializer=_set_up)
        images = self._shared_room(len(requests))
        count = min(self.workers, len(requests))
        parts = [list(range(first, len(requests), count)) for first in range(count)]
        try:
            tasks = [
                self._pool.submit(_load_part, self.recipe, [requests[row] for row in rows], rows, images)
                for rows in parts
            ]
            found = [task.result() for task in tasks]
        except BrokenProcessPool as error:
            self._pool = None
            raise BatchError(
                "a process that decodes images was ended from outside, as the system does when memory runs out",
                fix="give fewer workers, or backend='threads', which needs no processes",
            ) from error
        batch = self.hand_out(self.make_room(len(requests)).copy_(images))
        return DecodedBatch(batch, {row: reason for part in found for row, reason in part.items()})

    def _shared_room(self, images: int) -> Tensor:
        """Shared memory for a batch, used again: the system takes ten times as long to hand out fresh pages of it."""
        if self._shared is None or len(self._shared) < images:
            self._shared = torch.empty_like(self.make_room(images))
            self._shared.share_memory_()  # type: ignore[no-untyped-call]
        return self._shared[:images]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


def _set_up() -> None:
    """In a new worker: one thread for operators, and an end with the script, however that ends."""
    torch.set_num_threads(1)
    script = multiprocessing.parent_process()
    assert script is not None, "workers are started by a script"

    def follow() -> None:
        script.join()
        os._exit(1)

    threading.Thread(target=follow, name="manycard-follow", daemon=True).start()


def _load_part(recipe: Recipe, requests: list[Request], rows: list[int], images: Tensor) -> dict[int, str]:
    """In a worker: load files into rows of a shared batch; the bad ones."""
    writer = Writer(recipe)
    found = {row: writer.load(request, images[row]) for row, request in zip(rows, requests, strict=True)}
    return {row: reason for row, reason in found.items() if reason is not None}
