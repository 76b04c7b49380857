"""JPEGs decoded on a card: bytes go to it, and its JPEG engine and one batched pass do the rest.

Behaviour:
    * `torchvision.io.decode_jpeg` on a list of buffers decodes plain JPEGs. Other images (CMYK, PNG, ...) are decoded
      on the host and join the batched pass (`manycard.data.image_files.batched`).
    * torchvision keeps one decoder a process and leaves the old one behind when another card is asked for. So a process
      decodes on one card, its first; in `dp` the step spreads the batch from there.
    * A batch that the card's decoder refuses is decoded on the host, file by file, which finds the bad one.
    * Files are read by threads (`manycard.data.image_files.backends.files`), those of the next batch while the card
      decodes one.
    * Batches are ready on the stream that is current where `load` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from manycard.data.image_files.backends.backend import Backend, DecodedBatch
from manycard.data.image_files.backends.files import BegunRead, FileReader, Prepared, decode_on_host
from manycard.data.image_files.batched import show
from manycard.data.image_files.decode import jpeg_decoder
from manycard.data.image_files.recipe import Recipe, Request

__all__ = ["Card", "CardDecoder"]

Decoder = Callable[[list[Tensor]], list[Tensor]]
"""Encoded JPEGs on the host -> uint8 ``[3, height, width]`` on the device."""


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
        self._files: FileReader | None = None

    @classmethod
    def missing(cls) -> str | None:
        if not torch.cuda.is_available():
            return "a CUDA card"
        return None if jpeg_decoder() is not None else "torchvision"

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
            again = each if each.encoded is None else decode_on_host(each.encoded, requests[row], self.recipe)
            if isinstance(again, str):
                bad[row] = again
            else:
                found[row] = again
        return found

    def close(self) -> None:
        if self._files is not None:
            self._files.close()
            self._files = None
