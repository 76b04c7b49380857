"""NVIDIA DALI: decoding of the view alone, in DALI's threads or on cards' JPEG engines (*mixed*).

Behaviour:
    * Without cards there is one pipeline on the host, and batches are there. With cards there is one pipeline a card,
      each gets its shard of every batch, and the batch is joined on the first of them.
    * DALI is given views; none of its own readers, shufflings or draws is used. So shards and epochs are those of the
      loader, and exact.
    * Images that are no plain upright JPEGs are decoded by Pillow and handed to DALI without compression.
    * DALI ends a whole batch at a bad file. The files are then decoded one by one, which finds it, and pipelines are
      made anew.

Source: https://docs.nvidia.com/deeplearning/dali/user-guide/docs/
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.dlpack
from torch import Tensor

from manycard.data.image_files.backends.backend import Backend, DecodedBatch
from manycard.data.image_files.backends.inline import Inline
from manycard.data.image_files.decode import open_upright, read_file, stored_view
from manycard.data.image_files.header import BadImage, read_header
from manycard.data.image_files.recipe import Recipe, Request
from manycard.data.image_files.view import View
from manycard.engine.batches.sizes import shard_sizes

__all__ = ["Dali", "DaliMixed", "tensor_of"]

_LARGEST = 16
"""The first pipeline takes batches of at least this many; a larger batch makes a new one."""


class _Prepared(NamedTuple):
    encoded: Any
    """Bytes, as a NumPy array."""
    view: View


class Dali(Backend):
    """DALI's decoders in its own threads, on the host.

    Args:
        recipe: what every image becomes.
        workers: DALI's threads, and ours that read files.
        cards: torch's indices; none for the host.
    """

    name = "dali"
    extra = "dali"

    def __init__(self, recipe: Recipe, workers: int, cards: Sequence[int] = ()) -> None:
        super().__init__(recipe, workers)
        self.cards = tuple(cards)
        self._pipelines: list[Any] = []
        self._largest = 0
        self._pool: ThreadPoolExecutor | None = None

    @classmethod
    def missing(cls) -> str | None:
        return None if importlib.util.find_spec("nvidia.dali") is not None else "nvidia-dali-cuda130"

    def load(self, requests: Sequence[Request]) -> DecodedBatch:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers, "manycard-images")
        prepared = list(self._pool.map(_prepare, requests, [self.recipe] * len(requests)))
        bad = {row: found for row, found in enumerate(prepared) if isinstance(found, str)}
        good = [(row, found) for row, found in enumerate(prepared) if isinstance(found, _Prepared)]
        if not good:
            return DecodedBatch(self.recipe.empty(len(requests)), bad)
        try:
            images = self._run([found for _, found in good])
        except RuntimeError:
            self._end_pipelines()
            by_hand = Inline(self.recipe, 1).load(requests)
            if not by_hand.bad:
                raise  # every file is an image, so it was something else
            return by_hand
        if not bad:
            return DecodedBatch(images, bad)
        out = images.new_zeros(len(requests), *images.shape[1:])
        out[torch.tensor([row for row, _ in good], device=images.device)] = images
        return DecodedBatch(out, bad)

    def _run(self, prepared: list[_Prepared]) -> Tensor:
        sizes = shard_sizes(len(prepared), max(len(self.cards), 1))
        self._make_pipelines(max(sizes))
        start, used = 0, []
        for pipeline, size in zip(self._pipelines, sizes, strict=True):
            if size:
                _feed(pipeline, prepared[start : start + size])
                pipeline.schedule_run()
                used.append(pipeline)
            start += size
        shards = []
        for pipeline in used:
            (output,) = pipeline.share_outputs()
            shards.append(tensor_of(output))
            pipeline.release_outputs()
        first = shards[0].device
        images = torch.cat([shard.to(first) for shard in shards]) if len(shards) > 1 else shards[0]
        return images.to(self.recipe.dtype)

    def _make_pipelines(self, largest: int) -> None:
        if self._pipelines and largest <= self._largest:
            return
        self._end_pipelines()
        self._largest = max(largest, _LARGEST)
        threads = max(1, self.workers // max(len(self.cards), 1))
        for card in self.cards or (None,):
            self._pipelines.append(_make_pipeline(self.recipe, self._largest, threads, card))

    def _end_pipelines(self) -> None:
        self._pipelines.clear()

    def close(self) -> None:
        self._end_pipelines()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


class DaliMixed(Dali):
    """DALI with the JPEG engines of the cards: the host parses, the card decodes."""

    name = "dali-mixed"

    @classmethod
    def missing(cls) -> str | None:
        return Dali.missing() or (None if torch.cuda.is_available() else "a CUDA card")


def tensor_of(output: Any) -> Tensor:
    """A copy of one output of a pipeline, where the output is. It is whole on return: DALI writes its memory again."""
    theirs = torch.utils.dlpack.from_dlpack(output.as_tensor())
    if theirs.device.type != "cuda":
        return theirs.clone()
    # On a stream of its own, since waiting for the current one would be waiting for the training.
    stream, current = _copy_stream(theirs.device), torch.cuda.current_stream(theirs.device)
    with torch.cuda.stream(stream):
        ours = theirs.clone()
    stream.synchronize()
    ours.record_stream(current)
    return ours


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _prepare(request: Request, recipe: Recipe) -> _Prepared | str:
    """Read one file; the reason where it is bad."""
    try:
        data = read_file(request.path)
        header = read_header(data)
        if header is not None and header.orientation == 1:
            return _Prepared(np.frombuffer(data, np.uint8), stored_view(header, request.seed, recipe))
        image = open_upright(data)
        view = recipe.augment.view(request.seed, image.width, image.height, recipe.size)
        with io.BytesIO() as plain:
            image.save(plain, "BMP")
            return _Prepared(np.frombuffer(plain.getvalue(), np.uint8), view)
    except BadImage as error:
        return str(error)


def _feed(pipeline: Any, prepared: list[_Prepared]) -> None:
    views = [each.view for each in prepared]
    pipeline.feed_input("encoded", [each.encoded for each in prepared])
    pipeline.feed_input("start", np.array([(v.box.top, v.box.left) for v in views], np.int32))
    pipeline.feed_input("extent", np.array([(v.box.height, v.box.width) for v in views], np.int32))
    pipeline.feed_input("resized", np.array([v.resized for v in views], np.float32))
    pipeline.feed_input("inside", np.array([v.inside for v in views], np.int32))
    pipeline.feed_input("mirrored", np.array([v.mirrored for v in views], np.int32))


def _make_pipeline(recipe: Recipe, batch_size: int, threads: int, card: int | None) -> Any:
    dali: Any = importlib.import_module("nvidia.dali")
    fn, types = importlib.import_module("nvidia.dali.fn"), dali.types
    pipeline = dali.Pipeline(batch_size, threads, card, prefetch_queue_depth=1, exec_dynamic=False)
    with pipeline:
        numbers = {
            name: fn.external_source(name=name, dtype=kind, ndim=dims)
            for name, kind, dims in (
                ("start", types.INT32, 1),
                ("extent", types.INT32, 1),
                ("resized", types.FLOAT, 1),
                ("inside", types.INT32, 1),
                ("mirrored", types.INT32, 0),
            )
        }
        images = fn.decoders.image_slice(
            fn.external_source(name="encoded", dtype=types.UINT8, ndim=1),
            start=numbers["start"],
            shape=numbers["extent"],
            axes=(0, 1),
            device="cpu" if card is None else "mixed",
            output_type=types.RGB,
            adjust_orientation=False,
        )
        images = fn.resize(images, size=numbers["resized"], interp_type=types.INTERP_LINEAR, antialias=True)
        images = fn.slice(images, start=numbers["inside"], shape=list(recipe.size), axes=(0, 1))
        raw = recipe.dtype == torch.uint8
        images = fn.crop_mirror_normalize(
            images,
            mirror=numbers["mirrored"],
            mean=[0.0] * 3 if raw else [255 * value for value in recipe.mean],
            std=[1.0] * 3 if raw else [255 * value for value in recipe.std],
            dtype=types.UINT8 if raw else types.FLOAT,
            output_layout="CHW",
        )
        pipeline.set_outputs(images)
    pipeline.build()
    return pipeline
