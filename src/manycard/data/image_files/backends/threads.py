"""Decoders in threads of this process. They release the interpreter lock, and images are not sent anywhere."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from manycard.data.image_files.backends.backend import Backend, DecodedBatch
from manycard.data.image_files.backends.inline import Writer
from manycard.data.image_files.recipe import Recipe, Request

__all__ = ["Threads"]


class Threads(Backend):
    """As many images at once as there are threads; each is written to its place in the batch."""

    name = "threads"

    def __init__(self, recipe: Recipe, workers: int, device: torch.device | None = None) -> None:
        super().__init__(recipe, workers, device)
        self._writer = Writer(recipe)
        self._pool: ThreadPoolExecutor | None = None

    def load(self, requests: Sequence[Request]) -> DecodedBatch:
        if self._pool is None:
            self._pool = _start(self.workers)
        images = self.make_room(len(requests))
        bad: dict[int, str] = {}
        rows = itertools.count()

        def take_turns() -> None:
            # A task an image would cost 50 us of the interpreter lock; taking the next number costs nothing.
            while (row := next(rows)) < len(requests):
                reason = self._writer.load(requests[row], images[row])
                if reason is not None:
                    bad[row] = reason

        for turn in [self._pool.submit(take_turns) for _ in range(min(self.workers, len(requests)))]:
            turn.result()
        return DecodedBatch(self.hand_out(images), bad)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


def _start(workers: int) -> ThreadPoolExecutor:
    """Threads whose operators are not spread further: on one image they would only fight for cores."""
    pool = ThreadPoolExecutor(workers, "manycard-images")
    everyone = threading.Barrier(workers)
    before = torch.get_num_threads()

    def set_up() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # a thread takes the number over once, when it is first asked for
        everyone.wait()

    for task in [pool.submit(set_up) for _ in range(workers)]:
        task.result()
    # PyTorch keeps the newest number for threads to come as well; those are not ours.
    torch.set_num_threads(before)
    return pool
