"""JPEGs decoded on a card: bytes go to it, and its JPEG engine and one batched pass do the rest.

Behaviour:
    * `torchvision.io.decode_jpeg` on a list of buffers decodes plain JPEGs. Other images (CMYK, PNG, ...) are decoded
      on the host and join the batched pass (`manycard.data.image_files.batched`).
    * torchvision keeps one decoder a process and leaves the old one behind when another card is asked for. So a process
      decodes on one card, its first; in `dp` the step spreads the batch from there.
    * A batch that the card's decoder refuses is decoded on the host, file by file, which finds the bad one.
    * Files are read by threads, those of the next batch while the card decodes one.
    * Batches are ready on the stream that is current where `load` is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from io import FileIO
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from manycard.data.image_files.backends.backend import Backend, DecodedBatch
from manycard.data.image_files.batched import show
from manycard.data.image_files.decode import jpeg_decoder, open_upright, stored_view
from manycard.data.image_files.header import BadImage, read_header
from manycard.data.image_files.recipe import Recipe, Request
from manycard.data.image_files.view import View

__all__ = ["Card", "CardDecoder", "prepare"]

_FEWEST, _MOST = 8, 32
"""Files that a thread has open at once. A task for each would cost 50 us of the interpreter lock."""

Decoder = Callable[[list[Tensor]], list[Tensor]]
"""Encoded JPEGs on the host -> uint8 ``[3, height, width]`` on the device."""


class Prepared(NamedTuple):
    """A file that was read."""

    view: View
    encoded: Tensor | None
    """The bytes of a plain JPEG."""
    decoded: Tensor | None
    """Any other image, decoded on the host: uint8 ``[3, height, width]``."""


class Begun(NamedTuple):
    """A batch whose files are being read."""

    requests: Sequence[Request]
    parts: list[Future[list[Prepared | str]]]
    """One a thread, in order."""


def prepare(requests: Sequence[Request], recipe: Recipe, *, pin: bool) -> list[Prepared | str]:
    """Read files; the reason in place of one that is bad.

    Args:
        requests: the files.
        recipe: what they become.
        pin: read into pinned memory, which PyTorch gives out again and again: fresh memory costs more than reading.
    """
    with ExitStack() as stack:
        files = [_open(request.path, stack) for request in requests]
        sizes = [0 if isinstance(file, str) else os.fstat(file.fileno()).st_size for file in files]
        room = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pin)
        memory, begin = room.numpy().data, 0
        prepared: list[Prepared | str] = []
        for request, file, size in zip(requests, files, sizes, strict=True):
            end = begin + size
            if isinstance(file, str):
                prepared.append(file)
            else:
                prepared.append(_prepare(request, recipe, file, memory[begin:end], room[begin:end]))
            begin = end
    return prepared


def _open(path: str, stack: ExitStack) -> FileIO | str:
    try:
        return stack.enter_context(open(path, "rb", buffering=0))
    except OSError as error:
        return f"it can't be read ({error.strerror})"


def _prepare(request: Request, recipe: Recipe, file: FileIO, memory: memoryview, encoded: Tensor) -> Prepared | str:
    """Read a file into `memory`, which is that of `encoded`."""
    try:
        done = 0
        while done < len(memory):
            some = file.readinto(memory[done:])
            if not some:
                return "it became shorter while it was read"
            done += some
        header = read_header(memory)
        if header is not None:
            return Prepared(stored_view(header, request.seed, recipe), encoded, None)
        return _prepare_decoded(open_upright(bytes(memory)), request, recipe)
    except OSError as error:
        return f"it can't be read ({error.strerror})"
    except BadImage as error:
        return str(error)


def _prepare_decoded(image: Any, request: Request, recipe: Recipe) -> Prepared:
    view = recipe.augment.view(request.seed, image.width, image.height, recipe.size)
    return Prepared(view, None, torch.from_numpy(np.array(image)).permute(2, 0, 1))


def _prepare_on_host(encoded: Tensor, request: Request, recipe: Recipe) -> Prepared | str:
    """Decode a JPEG that the card refused; the reason where it is bad."""
    try:
        return _prepare_decoded(open_upright(encoded.numpy().tobytes()), request, recipe)
    except BadImage as error:
        return str(error)


class CardDecoder:
    """torchvision's decoder on one card, on a stream of its own.

    torchvision decodes on a stream that does not wait for the one its output is allocated on. Memory that the
    training still reads could so be written; memory of our own stream, once that has done its work, can't.

    Args:
        device: the card.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._read: object = None

    def __call__(self, encoded: list[Tensor]) -> list[Tensor]:
        decoder = jpeg_decoder()
        assert decoder is not None, "the backend was not to be made without torchvision"
        decoded: list[Tensor] = decoder(encoded, device=self.device)
        return decoded

    def run(self, work: Callable[[], Tensor], read: object) -> Tensor:
        """Do `work` on this stream, and let the current stream wait for it.

        Args:
            work: gives the batch.
            read: what holds the memory that the card reads for it, which PyTorch must not give out again before.
        """
        with torch.cuda.device(self.device):
            self._stream.synchronize()
            self._read = read
            with torch.cuda.stream(self._stream):
                result = work()
            current = torch.cuda.current_stream()
            current.wait_stream(self._stream)
            result.record_stream(current)
        return result


class Card(Backend):
    """Decodes on the card's JPEG engine.

    Args:
        recipe: what every image becomes.
        workers: threads that read files.
        device: the card; another device takes `decoder`.
        decoder: decodes a list of JPEGs on `device`; None for torchvision's on a card.
    """

    name = "card"

    def __init__(self, recipe: Recipe, workers: int, device: torch.device, decoder: Decoder | None = None) -> None:
        super().__init__(recipe, workers, device)
        self._decode = decoder or CardDecoder(device)
        self._on_card = device.type == "cuda"
        self._pool: ThreadPoolExecutor | None = None

    @classmethod
    def missing(cls) -> str | None:
        if not torch.cuda.is_available():
            return "a CUDA card"
        return None if jpeg_decoder() is not None else "torchvision"

    def begin(self, requests: Sequence[Request]) -> Begun:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers, "manycard-images")
        size = min(max(_FEWEST, -(-len(requests) // self.workers)), _MOST)
        parts = [requests[first : first + size] for first in range(0, len(requests), size)]
        pin = self._on_card
        return Begun(requests, [self._pool.submit(prepare, part, self.recipe, pin=pin) for part in parts])

    def load(self, requests: Sequence[Request]) -> DecodedBatch:
        return self.finish(self.begin(requests))

    def finish(self, begun: Begun) -> DecodedBatch:
        requests = begun.requests
        prepared = [each for part in begun.parts for each in part.result()]
        bad = {row: found for row, found in enumerate(prepared) if isinstance(found, str)}
        good = {row: found for row, found in enumerate(prepared) if isinstance(found, Prepared)}
        if not good:
            return DecodedBatch(self.recipe.empty(len(requests)), bad)
        try:
            images = self._shown(good)
        except RuntimeError as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            good = self._decode_on_host(good, requests, bad)
            if not good:
                return DecodedBatch(self.recipe.empty(len(requests)), bad)
            images = self._shown(good)
        if bad:
            out = images.new_zeros(len(requests), *images.shape[1:])
            out[torch.tensor(list(good), device=images.device)] = images
            images = out
        return DecodedBatch(images, bad)

    def _shown(self, good: dict[int, Prepared]) -> Tensor:
        if isinstance(self._decode, CardDecoder):
            return self._decode.run(lambda: self._decode_and_show(good), good)
        return self._decode_and_show(good)

    def _decode_and_show(self, good: dict[int, Prepared]) -> Tensor:
        encoded = [each.encoded for each in good.values() if each.encoded is not None]
        decoded = iter(self._decode(encoded) if encoded else ())
        images = [next(decoded) if each.decoded is None else each.decoded.to(self.device) for each in good.values()]
        return show(images, [each.view for each in good.values()], self.recipe)

    def _decode_on_host(
        self, good: dict[int, Prepared], requests: Sequence[Request], bad: dict[int, str]
    ) -> dict[int, Prepared]:
        """The files of a batch that the card refused, decoded by Pillow; bad ones go to `bad`."""
        found = {}
        for row, each in good.items():
            again = each if each.encoded is None else _prepare_on_host(each.encoded, requests[row], self.recipe)
            if isinstance(again, str):
                bad[row] = again
            else:
                found[row] = again
        return found

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
