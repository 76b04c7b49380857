"""Files read into one piece of memory a batch, for a decoder that takes bytes.

Behaviour:
    * One thread reads what the system holds in memory, and reads headers and draws views: many threads that each do
      a little in Python wait for the interpreter lock most of the time (on 16 cores 55 us an image in one thread, 127
      in 16). Files that have to be waited for, and images that are no plain JPEGs, go to a pool of threads.
    * With `pin`, the memory is pinned: PyTorch gives it out again and again. Fresh memory costs more than reading.
    * A bad file does not end the batch: its reason stands in its place.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from manycard.data.image_files.decode import open_upright, stored_view
from manycard.data.image_files.header import BadImage, read_header
from manycard.data.image_files.recipe import Recipe, Request
from manycard.data.image_files.view import View

__all__ = ["BegunRead", "Encoded", "FileReader", "Prepared", "decode_on_host"]

_AT_ONCE: int | None = getattr(os, "RWF_NOWAIT", None)
"""Reads only what is in memory; not every system has it."""


class Encoded(NamedTuple):
    """The bytes of one file, in the memory of its batch."""

    room: Tensor
    """That memory: uint8, on the host."""
    begin: int
    length: int

    @property
    def address(self) -> int:
        """Where the first byte is."""
        return self.room.data_ptr() + self.begin

    def tensor(self) -> Tensor:
        """The bytes: uint8 ``[length]``."""
        return self.room[self.begin : self.begin + self.length]


class Prepared(NamedTuple):
    """A file that was read."""

    view: View
    encoded: Encoded | None
    """A plain JPEG."""
    decoded: Tensor | None
    """Any other image, decoded on the host: uint8 ``[3, height, width]``."""


class BegunRead(NamedTuple):
    """A batch whose files are being read."""

    requests: Sequence[Request]
    read: Future[list[Prepared | str | Future[Prepared | str]]]

    def result(self) -> list[Prepared | str]:
        """The files in order, when all are there; the reason in place of one that is bad."""
        return [each.result() if isinstance(each, Future) else each for each in self.read.result()]


class FileReader:
    """Reads batches of files.

    Args:
        recipe: what each image becomes.
        workers: threads for what has to be waited for.
        pin: whether to read into pinned memory.
    """

    def __init__(self, recipe: Recipe, workers: int, *, pin: bool) -> None:
        self._recipe = recipe
        self._pin = pin
        self._reader = ThreadPoolExecutor(1, "manycard-files")
        self._pool = ThreadPoolExecutor(workers, "manycard-images")

    def begin(self, requests: Sequence[Request]) -> BegunRead:
        """Start to read; batches are read in the order in which they were begun."""
        return BegunRead(requests, self._reader.submit(self._read, requests))

    def _read(self, requests: Sequence[Request]) -> list[Prepared | str | Future[Prepared | str]]:
        sizes = [_size(request.path) for request in requests]
        room = torch.empty(sum(max(size, 0) for size in sizes), dtype=torch.uint8, pin_memory=self._pin)
        whole = room.numpy().data  # slices of it cost a tenth of a tensor's
        found: list[Prepared | str | Future[Prepared | str]] = []
        begin = 0
        for request, size in zip(requests, sizes, strict=True):
            encoded = Encoded(room, begin, max(size, 0))
            memory = whole[begin : begin + encoded.length]
            begin += encoded.length
            if size < 0 or not _read_at_once(request.path, memory):
                found.append(self._pool.submit(self._wait_for, request, memory, encoded))
                continue
            prepared = self._prepare(request, memory, encoded)
            found.append(prepared or self._pool.submit(self._decode, request, memory))
        return found

    def _prepare(self, request: Request, memory: memoryview, encoded: Encoded) -> Prepared | str | None:
        """What became of a file that was read; None for an image that is no plain JPEG."""
        try:
            header = read_header(memory)
        except BadImage as error:
            return str(error)
        return Prepared(stored_view(header, request.seed, self._recipe), encoded, None) if header is not None else None

    def _decode(self, request: Request, memory: memoryview) -> Prepared | str:
        return _decoded(bytes(memory), request, self._recipe)

    def _wait_for(self, request: Request, memory: memoryview, encoded: Encoded) -> Prepared | str:
        try:
            with open(request.path, "rb", buffering=0) as file:
                done = 0
                while done < len(memory):
                    some = file.readinto(memory[done:])
                    if not some:
                        return "it became shorter while it was read"
                    done += some
        except OSError as error:
            return f"it can't be read ({error.strerror})"
        return self._prepare(request, memory, encoded) or self._decode(request, memory)

    def close(self) -> None:
        """End the threads; what was not begun is dropped."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._pool.shutdown(wait=True, cancel_futures=True)


def _size(path: str) -> int:
    """The size of a file in bytes; -1 where it can't be known."""
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _read_at_once(path: str, memory: memoryview) -> bool:
    """Read a whole file if the system holds it in memory."""
    if _AT_ONCE is None:
        return False
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.preadv(file, [memory], 0, _AT_ONCE) == len(memory)
    except OSError:  # EAGAIN: it is not in memory; EOPNOTSUPP: this file system can't tell
        return False
    finally:
        os.close(file)


def _decoded(data: bytes, request: Request, recipe: Recipe) -> Prepared | str:
    """An image decoded by Pillow; the reason where it is bad."""
    try:
        image: Any = open_upright(data)
    except BadImage as error:
        return str(error)
    view = recipe.augment.view(request.seed, image.width, image.height, recipe.size)
    return Prepared(view, None, torch.from_numpy(np.array(image)).permute(2, 0, 1))


def decode_on_host(encoded: Encoded, request: Request, recipe: Recipe) -> Prepared | str:
    """Decode a JPEG that the card refused; the reason where it is bad."""
    return _decoded(encoded.tensor().numpy().tobytes(), request, recipe)
