"""JPEGs decoded on the cards: bytes go to them, and their JPEG engines and one batched pass do the rest.

Behaviour:
    * Each card decodes its part of a batch, in a thread of its own; parts are joined on the first. One process has one
      decoder a card: a new one for each batch would cost ten times as much as decoding.
    * Plain JPEGs are decoded by nvJPEG (`manycard.data.image_files.backends.nvjpeg`). Other images (CMYK, PNG, ...) are
      decoded on the host and join the batched pass (`manycard.data.image_files.batched`).
    * All work of a card is queued on one stream, of higher priority than the training's; parts don't overlap on it.
    * A batch that a card's decoder refuses is decoded on the host, file by file, which finds the bad one.
    * Files are read by threads (`manycard.data.image_files.backends.files`), those of the next batch while the cards
      decode one.
    * Batches are ready on the stream that is current where `load` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

import torch
from torch import Tensor

from manycard.data.image_files.backends.backend import Backend, DecodedBatch
from manycard.data.image_files.backends.files import BegunRead, Encoded, FileReader, Prepared, decode_on_host
from manycard.data.image_files.backends.nvjpeg import NvJpeg, find_library
from manycard.data.image_files.batched import show
from manycard.data.image_files.recipe import Recipe, Request
from manycard.engine.batches.sizes import shard_sizes

__all__ = ["Card", "CardDecoder"]

Decoder = Callable[[Sequence[Encoded]], list[Tensor]]
"""JPEGs on the host -> uint8 ``[3, height, width]`` on the device."""
_PRIORITY = -1


class Place(NamedTuple):
    """Where a part's images go."""

    images: Tensor
    """``[n, 3, height, width]``."""
    stream: torch.cuda.Stream | None
    """The stream that they are ready on then; None where they are no card's."""


class CardDecoder:
    """Decodes and shows one card's part of each batch, on a stream of its own.

    Args:
        device: the card.
        recipe: what every image becomes.
        decode: decodes on `device`, on the current stream; None for nvJPEG.
    """

    def __init__(self, device: torch.device, recipe: Recipe, decode: Decoder | None = None) -> None:
        self.device = device
        self._recipe = recipe
        self._decode = decode
        self._nvjpeg: NvJpeg | None = None
        self._stream = (
            torch.cuda.Stream(device, priority=_PRIORITY) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        )
        self._read: object = None
        """What holds the memory that the card reads for the newest part."""

    def make(self, part: Sequence[Prepared], place: Place | None) -> Tensor:
        """Decode and show `part`.

        Args:
            part: files that were read.
            place: where the images go; None for new memory on this card, ready on the thread's current stream there.

        Returns:
            ``[len(part), 3, height, width]``.

        Raises:
            RuntimeError: a file can't be decoded.
        """
        if self._stream is None:
            images = self._shown(part)
            return images if place is None else place.images.copy_(images)
        # nvJPEG doesn't wait for the part before, whose memory it would write.
        self._stream.synchronize()
        self._read = part
        current = torch.cuda.current_stream(self.device) if place is None else place.stream
        assert current is not None, "a place on a card has a stream"
        with torch.cuda.stream(current), torch.cuda.stream(self._stream):
            images = self._shown(part)
            if place is not None:
                self._stream.wait_stream(current)
                images = place.images.copy_(images, non_blocking=True)
        current.wait_stream(self._stream)
        if place is None:
            images.record_stream(current)
        return images

    def _shown(self, part: Sequence[Prepared]) -> Tensor:
        encoded = [each.encoded for each in part if each.encoded is not None]
        decoded = iter(self._decoder()(encoded) if encoded else ())
        images = [next(decoded) if each.decoded is None else each.decoded.to(self.device) for each in part]
        return show(images, [each.view for each in part], self._recipe)

    def _decoder(self) -> Decoder:
        if self._decode is None:
            self._nvjpeg = NvJpeg(self.device)
            self._decode = self._nvjpeg.decode
        return self._decode

    def close(self) -> None:
        """Give the card's memory back."""
        if self._nvjpeg is not None:
            self._nvjpeg.close()
            self._nvjpeg = self._decode = None
        self._read = None


class Card(Backend):
    """Decodes on the cards' JPEG engines.

    Args:
        recipe: what every image becomes.
        workers: threads that read files.
        devices: the cards; batches are handed out on the first.
        decode: decodes a list of JPEGs, in place of nvJPEG.
    """

    name = "card"

    def __init__(
        self, recipe: Recipe, workers: int, devices: Sequence[torch.device], decode: Decoder | None = None
    ) -> None:
        super().__init__(recipe, workers, devices[0])
        self._decoders = [CardDecoder(device, recipe, decode) for device in devices]
        self._on_card = devices[0].type == "cuda"
        self._files: FileReader | None = None
        self._threads: list[ThreadPoolExecutor] = []

    @classmethod
    def missing(cls) -> str | None:
        if not torch.cuda.is_available():
            return "a CUDA card"
        return None if find_library() is not None else "nvidia-nvjpeg"

    def begin(self, requests: Sequence[Request]) -> BegunRead:
        if self._files is None:
            self._files = FileReader(self.recipe, self.workers, pin=self._on_card)
        return self._files.begin(requests)

    def load(self, requests: Sequence[Request]) -> DecodedBatch:
        return self.finish(self.begin(requests))

    def finish(self, begun: BegunRead) -> DecodedBatch:
        requests, prepared = begun.requests, begun.result()
        bad = {row: found for row, found in enumerate(prepared) if isinstance(found, str)}
        good = {row: found for row, found in enumerate(prepared) if isinstance(found, Prepared)}
        if not good:
            return DecodedBatch(self.recipe.empty(len(requests)), bad)
        try:
            images = self._made(list(good.values()))
        except RuntimeError as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            good = self._decode_on_host(good, requests, bad)
            if not good:
                return DecodedBatch(self.recipe.empty(len(requests)), bad)
            images = self._made(list(good.values()))
        if bad:
            out = images.new_zeros(len(requests), *images.shape[1:])
            out[torch.tensor(list(good), device=images.device)] = images
            images = out
        return DecodedBatch(images, bad)

    def _made(self, good: Sequence[Prepared]) -> Tensor:
        """The images of `good`, on the first card, each card having made its part."""
        sizes = shard_sizes(len(good), len(self._decoders))
        if sizes[0] == len(good):
            return self._decoders[0].make(good, None)
        if not self._threads:
            self._threads = [ThreadPoolExecutor(1, "manycard-decode") for _ in self._decoders]
        images = torch.empty(len(good), 3, *self.recipe.size, dtype=self.recipe.dtype, device=self.device)
        stream = torch.cuda.current_stream(self.device) if self._on_card else None
        begin, making = 0, []
        for decoder, thread, size in zip(self._decoders, self._threads, sizes, strict=True):
            part, place = good[begin : begin + size], Place(images[begin : begin + size], stream)
            making += [thread.submit(decoder.make, part, place)] if size else []
            begin += size
        wait(making)  # all of them, so that nothing is written any more where one has failed
        for each in making:
            each.result()
        return images

    def _decode_on_host(
        self, good: dict[int, Prepared], requests: Sequence[Request], bad: dict[int, str]
    ) -> dict[int, Prepared]:
        """The files of a batch that the card refused, decoded by Pillow; bad ones go to `bad`."""
        found = {}
        for row, each in good.items():
            again = each if each.encoded is None else decode_on_host(each.encoded, requests[row], self.recipe)
            if isinstance(again, str):
                bad[row] = again
            else:
                found[row] = again
        return found

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown(wait=True, cancel_futures=True)
        self._threads = []
        for decoder in self._decoders:
            decoder.close()
        if self._files is not None:
            self._files.close()
            self._files = None
