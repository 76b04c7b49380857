"""A DALI pipeline of the user's own as a loader's source: one pipeline a card, every sample once an epoch.

Behaviour:
    * The function, decorated with DALI's ``pipeline_def``, is called once a card, with ``shard_id`` and ``num_shards``
      to hand to its reader. What the cards' pipelines give is joined to global batches, in the order of the cards.
    * The reader must pad its last batch (``pad_last_batch=True``): padding is cut off again, while samples that a
      reader takes from the next epoch can't be told apart. Otherwise it is refused.
    * Shuffling and draws are DALI's. An epoch that was left early ends there: the next begins with new pipelines.
    * In `ddp` each rank reads whole batches and keeps its part, as of any stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from manycard.data.image_files.backends.choose import default_workers
from manycard.data.image_files.backends.dali import Dali, tensor_of
from manycard.data.image_files.places import own_devices
from manycard.data.sampler import whole_number
from manycard.engine.batches.sizes import shard_sizes
from manycard.errors import MissingExtraError, SettingError

__all__ = ["dali_pipeline"]


def dali_pipeline(
    function: Callable[..., Any],
    batch_size: int,
    *,
    reader: str = "Reader",
    cards: Sequence[Any] | None = None,
    workers: int | None = None,
    **arguments: Any,
) -> DataLoader[Any]:
    """Read from DALI pipelines; give the result to `Parallel.loader`.

    Args:
        function: decorated with ``nvidia.dali.pipeline_def``; takes ``shard_id`` and ``num_shards``.
        batch_size: samples in a global batch, over all cards.
        reader: the name that the function gives to its reader.
        cards: torch's indices, or what `Parallel.cards` holds; None, or simulated ones, for pipelines on the host.
        workers: threads of DALI, over all pipelines.
        arguments: handed to the function.

    Raises:
        MissingExtraError: DALI is not installed.
        SettingError: the reader does not pad, or there is none of that name.
    """
    if Dali.missing():
        raise MissingExtraError("nvidia-dali-cuda130", "dali", "dali_pipeline")
    whole_number("batch_size", batch_size, 1, "give the size of the global batch, such as batch_size=64")
    # None is the host.
    places = [device.index if device.type == "cuda" else None for device in own_devices(cards)] or [None]
    if batch_size < len(places):
        raise SettingError("batch_size", batch_size, f"there are {len(places)} cards", fix="give one sample a card")
    threads = max(1, (workers or default_workers()) // len(places))
    stream = _DaliStream(function, batch_size, reader, places, threads, arguments)
    return DataLoader(stream, batch_size=None)


class _DaliStream(IterableDataset[Any]):
    """Walks the pipelines' epochs."""

    def __init__(
        self,
        function: Callable[..., Any],
        batch_size: int,
        reader: str,
        places: Sequence[int | None],
        threads: int,
        arguments: dict[str, Any],
    ) -> None:
        self._function = function
        self._sizes = shard_sizes(batch_size, len(places))
        self._reader = reader
        self._places = places
        self._threads = threads
        self._arguments = arguments
        self._pipelines: list[Any] = []
        self._epoch = 0
        self._pipelines = self._build()
        self._check()
        self._batches = max(
            -(-shard // size) for shard, size in zip(self._shards(self._pipelines), self._sizes, strict=True)
        )

    def _build(self) -> list[Any]:
        pipelines = []
        for shard, place in enumerate(self._places):
            pipeline = self._function(
                batch_size=self._sizes[shard],
                num_threads=self._threads,
                device_id=place,
                shard_id=shard,
                num_shards=len(self._places),
                **self._arguments,
            )
            pipeline.build()
            pipelines.append(pipeline)
        self._epoch = 0
        return pipelines

    def _check(self) -> None:
        known = self._pipelines[0].reader_meta()
        if self._reader not in known:
            names = ", ".join(known) or "none"
            raise SettingError("reader", self._reader, f"the pipeline's readers are: {names}", fix="name one of them")
        shards = known[self._reader]["number_of_shards"]
        if shards != len(self._places):
            raise SettingError(
                "num_shards",
                shards,
                f"there are {len(self._places)} pipelines, one a card",
                fix="hand shard_id and num_shards to the reader",
            )
        if not known[self._reader]["pad_last_batch"]:
            raise SettingError(
                "pad_last_batch",
                False,
                "the last batch would hold samples of the next epoch",
                fix="give the reader pad_last_batch=True",
            )

    def _shards(self, pipelines: list[Any]) -> list[int]:
        """Samples that each pipeline has in this epoch; without ``stick_to_shard`` shards move on by one an epoch."""
        count = len(self._places)
        shards = []
        for pipeline in pipelines:
            meta = pipeline.reader_meta(self._reader)
            shard = meta["shard_id"] if meta["stick_to_shard"] else (meta["shard_id"] + self._epoch) % count
            samples = meta["epoch_size"]
            shards.append(samples * (shard + 1) // count - samples * shard // count)
        return shards

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        if not self._pipelines:
            self._pipelines = self._build()
        pipelines, self._pipelines = self._pipelines, []  # until the epoch is done
        left = self._shards(pipelines)
        while any(left):
            parts = []
            for place, pipeline in enumerate(pipelines):
                outputs = pipeline.run()
                kept = min(left[place], self._sizes[place])
                left[place] -= kept
                if kept:
                    parts.append([tensor_of(output)[:kept] for output in outputs])
            first = [part.device for part in parts[0]]
            joined = zip(*parts, strict=True)
            yield tuple(torch.cat([part.to(to) for part in each]) for to, each in zip(first, joined, strict=True))
        self._pipelines = pipelines
        self._epoch += 1
