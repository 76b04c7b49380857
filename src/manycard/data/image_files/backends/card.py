"""JPEGs decoded on a card: bytes go to it, and its JPEG engine and one batched pass do the rest.

Behaviour:
    * `torchvision.io.decode_jpeg` on a list of buffers decodes plain JPEGs. Other images (CMYK, PNG, ...) are decoded
      on the host and join the batched pass (`manycard.data.image_files.batched`).
    * torchvision keeps one decoder a process and leaves the old one behind when another card is asked for. So a process
      decodes on one card, its first; in `dp` the step spreads the batch from there.
    * A batch that the card's decoder refuses is decoded on the host, file by file, which finds the bad one.
    * Batches are ready on the stream that is current where `load` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from manycard.data.image_files.backends.backend import Backend, DecodedBatch
from manycard.data.image_files.batched import show
from manycard.data.image_files.decode import jpeg_decoder, open_upright, read_file, stored_view
from manycard.data.image_files.header import BadImage, read_header
from manycard.data.image_files.recipe import Recipe, Request
from manycard.data.image_files.view import View

__all__ = ["Card", "CardDecoder", "prepare"]

Decoder = Callable[[list[Tensor]], list[Tensor]]
"""Encoded JPEGs on the host -> uint8 ``[3, height, width]`` on the device."""


class Prepared(NamedTuple):
    """A file that was read."""

    view: View
    encoded: Tensor | None
    """The bytes of a plain JPEG."""
    decoded: Tensor | None
    """Any other image, decoded on the host: uint8 ``[3, height, width]``."""


def prepare(request: Request, recipe: Recipe) -> Prepared | str:
    """Read one file; the reason where it is bad."""
    try:
        data = read_file(request.path)
        header = read_header(data)
        if header is not None:
            encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            return Prepared(stored_view(header, request.seed, recipe), encoded, None)
        return _prepare_decoded(open_upright(data), request, recipe)
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

    def __call__(self, encoded: list[Tensor]) -> list[Tensor]:
        decoder = jpeg_decoder()
        assert decoder is not None, "the backend was not to be made without torchvision"
        decoded: list[Tensor] = decoder(encoded, device=self.device)
        return decoded

    def run(self, work: Callable[[], Tensor]) -> Tensor:
        """Do `work` on this stream, and let the current stream wait for it."""
        with torch.cuda.device(self.device):
            self._stream.synchronize()
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
        self._pool: ThreadPoolExecutor | None = None

    @classmethod
    def missing(cls) -> str | None:
        if not torch.cuda.is_available():
            return "a CUDA card"
        return None if jpeg_decoder() is not None else "torchvision"

    def load(self, requests: Sequence[Request]) -> DecodedBatch:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers, "manycard-images")
        prepared = list(self._pool.map(prepare, requests, [self.recipe] * len(requests)))
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
            return self._decode.run(lambda: self._decode_and_show(good))
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
