"""A dataset of image files whose batches are decoded together.

Behaviour:
    * `dataset[i]` is an `ImageSample`: the file, the label and a seed, drawn where the loader has seeded that sample's
      draws. PyTorch's own collating hands a list of them to the backend, which decodes the batch at once. So the
      dataset works in `Parallel.loader` and in a DataLoader alike, and a sample's view does not depend on who decodes.
    * In the script's own process, a loader of ours lets a thread decode further batches while the script computes
      (`manycard.data.ahead`).
    * With loader workers (``num_workers``), each worker decodes whole batches, in its share of the threads; one worker
      with all of them so reads ahead while the script's process computes.
    * A bad file raises `BatchError` with its path, or, with ``on_error="skip"``, its place in the batch is taken by a
      copy of the next good image of the batch, with that one's label: batches keep their size, on which ranks agree.
      It is said once for each file; `skipped` names them, and `summary` counts them.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from manycard.data.ahead import allowed
from manycard.data.image_files.backends import Backend, make_backend
from manycard.data.image_files.reading import PendingBatch, ReadingThread
from manycard.data.image_files.recipe import Recipe, Request
from manycard.errors import BatchError, SettingError

__all__ = ["ImageFiles", "ImageSample"]


_INHERITED: list[Backend] = []
"""Backends of the process that this one was forked from. They are never ended here: their threads are not in this
process, and a pipeline of DALI's that is taken down in a fork ends it."""


class ImageSample(Sequence[Any]):
    """One sample that is not decoded yet; read as a pair, it is ``(image, label)``."""

    __slots__ = ("dataset", "number", "seed")

    def __init__(self, dataset: ImageFiles, number: int, seed: int) -> None:
        self.dataset = dataset
        self.number = number
        self.seed = seed

    def __len__(self) -> int:
        return 2

    def __getitem__(self, place: Any) -> Any:
        return self._pair()[place]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._pair())

    def _pair(self) -> tuple[Any, Any]:
        images, labels = self.dataset.load_batch([self.number], [self.seed])
        return images[0], labels[0]


def _collate_samples(samples: Sequence[ImageSample], *, collate_fn_map: Any = None) -> list[Any] | PendingBatch:
    by_dataset: dict[int, list[int]] = {}
    for place, sample in enumerate(samples):  # of several datasets where they were joined to one
        by_dataset.setdefault(id(sample.dataset), []).append(place)
    images, labels = [], []
    for places in by_dataset.values():
        some = [samples[place] for place in places]
        if len(by_dataset) == 1 and allowed():
            return some[0].dataset.begin_batch([each.number for each in some], [each.seed for each in some])
        found = some[0].dataset.load_batch([each.number for each in some], [each.seed for each in some])
        images.append(found[0])
        labels += found[1]
    if len(images) == 1:
        return [images[0], default_collate(labels)]
    order = [place for places in by_dataset.values() for place in places]
    back = sorted(range(len(order)), key=order.__getitem__)
    return [torch.cat(images)[back], default_collate([labels[place] for place in back])]


# PyTorch's documented way of teaching its collating a new type of sample.
default_collate_fn_map[ImageSample] = _collate_samples


class ImageFiles(Dataset[Any]):
    """Image files and their labels, decoded in batches by a backend.

    Made by `image_folder` and `images`.

    Attributes:
        files: the paths.
        labels: one a file: numbers, tensors, or what PyTorch's ``default_collate`` takes.
        classes: names of labels; empty where there are none.
    """

    def __init__(
        self,
        files: Sequence[str],
        labels: Sequence[Any],
        recipe: Recipe,
        *,
        backend: str,
        workers: int,
        cards: Sequence[int] | None,
        on_error: str,
        classes: Sequence[str] = (),
    ) -> None:
        self.files = files
        self.labels = labels
        self.classes = list(classes)
        self.recipe = recipe
        self.on_error = on_error
        self._choice: dict[str, Any] = {"name": backend, "workers": workers, "cards": cards}
        self._backend: Backend | None = None
        self._reading: ReadingThread | None = None
        self._owner = 0
        self._bad = torch.zeros(len(files), dtype=torch.bool).share_memory_()  # type: ignore[no-untyped-call]
        self._loaded = 0
        self._seconds = 0.0

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> ImageSample:
        if not -len(self.files) <= index < len(self.files):
            raise IndexError(index)
        return ImageSample(self, index, random.getrandbits(64))

    def with_seeds(self, indices: Sequence[int], seeds: Sequence[int]) -> list[ImageSample]:
        """The samples at `indices`, with the views that `seeds` give; our loaders ask for them so."""
        return [ImageSample(self, index, seed) for index, seed in zip(indices, seeds, strict=True)]

    def load_batch(self, indices: Sequence[int], seeds: Sequence[int]) -> tuple[Tensor, list[Any]]:
        """Decode the files at `indices`, with the views that `seeds` give.

        Returns:
            Images ``[n, 3, height, width]`` and their labels.

        Raises:
            BatchError: a file is bad, or with ``on_error="skip"`` all of them are.
        """
        requests = self._requests(indices, seeds)
        backend = self.backend_for(requests)
        return self._finish(backend, backend.begin(requests), requests, indices)

    def begin_batch(self, indices: Sequence[int], seeds: Sequence[int]) -> PendingBatch:
        """`load_batch`, and PyTorch's collating of the labels, in a thread; errors come with the result."""
        requests = self._requests(indices, seeds)
        backend = self.backend_for(requests)
        begun = backend.begin(requests)

        def finish() -> tuple[Tensor, Any]:
            images, labels = self._finish(backend, begun, requests, indices)
            return images, default_collate(labels)

        if self._reading is None:
            self._reading = ReadingThread()
        return self._reading.submit(finish, backend.device)

    def _requests(self, indices: Sequence[int], seeds: Sequence[int]) -> list[Request]:
        return [Request(self.files[index], seed) for index, seed in zip(indices, seeds, strict=True)]

    def _finish(
        self, backend: Backend, begun: Any, requests: Sequence[Request], indices: Sequence[int]
    ) -> tuple[Tensor, list[Any]]:
        begin = time.perf_counter()
        found = backend.finish(begun)
        self._seconds += time.perf_counter() - begin
        self._loaded += len(requests)
        chosen = list(indices)
        if found.bad:
            images = found.images
            for row, source in self._stand_ins(requests, indices, found.bad).items():
                images[row], chosen[row] = images[source], chosen[source]
        return found.images, [self.labels[index] for index in chosen]

    def _stand_ins(self, requests: Sequence[Request], indices: Sequence[int], bad: dict[int, str]) -> dict[int, int]:
        """For each bad row the row that takes its place."""
        first = min(bad)
        if self.on_error == "raise":
            raise BatchError(
                f"{requests[first].path}: {bad[first]}",
                fix="replace or delete the file, or give on_error='skip'",
            )
        good = [row for row in range(len(requests)) if row not in bad]
        if not good:
            raise BatchError(
                f"none of the {len(requests)} files of a batch is an image, {requests[first].path} the first of them: "
                f"{bad[first]}",
                fix="look at the files",
            )
        for row, reason in sorted(bad.items()):
            if not self._bad[indices[row]]:
                self._bad[indices[row]] = True
                print(f"manycard: skipped {requests[row].path}: {reason}", file=sys.stderr, flush=True)
        return {row: next((other for other in good if other > row), good[0]) for row in bad}

    # ---- who decodes ---------------------------------------------------------------------------------------

    def backend_for(self, requests: Sequence[Request]) -> Backend:
        """This process's backend; with ``backend="auto"`` the first call measures on `requests`."""
        if self._backend is not None and self._owner != os.getpid():
            _INHERITED.append(self._backend)
            self._backend = self._reading = None
        if self._backend is None:
            self._backend = self._make_backend(requests)
            self._owner = os.getpid()
        return self._backend

    def _make_backend(self, requests: Sequence[Request]) -> Backend:
        worker = get_worker_info()
        if worker is None:
            return make_backend(self.recipe, requests, **self._choice)
        name, threads = self._choice["name"], max(1, self._choice["workers"] // worker.num_workers)
        if name in ("card", "dali-mixed"):
            raise SettingError(
                "num_workers",
                worker.num_workers,
                f"backend={name!r} decodes on a card, which worker processes don't touch",
                fix="leave out num_workers, or give another backend",
            )
        if name in ("auto", "torchvision"):
            # Measuring beside other workers would measure those, and a worker starts no processes.
            name = "threads"
        return make_backend(self.recipe, requests, name, threads, None)

    def close(self) -> None:
        """End the backend's threads, processes and pipelines; the next batch starts them anew."""
        if self._backend is not None and self._owner == os.getpid():
            if self._reading is not None:
                self._reading.close()
                self._reading = None
            self._backend.close()
            self._backend = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_backend": None, "_reading": None}

    # ---- what became of the files --------------------------------------------------------------------------

    @property
    def skipped(self) -> list[str]:
        """Files that were bad, in any process so far."""
        return [self.files[index] for index in self._bad.nonzero().flatten().tolist()]

    def summary(self) -> dict[str, Any]:
        """What was loaded in this process since the last call, such as an epoch's: a count, a speed, bad files."""
        loaded, seconds, self._loaded, self._seconds = self._loaded, self._seconds, 0, 0.0
        return {
            "backend": None if self._backend is None else self._backend.name,
            "images": loaded,
            "images_per_s": loaded / seconds if seconds else None,
            "skipped": len(self.skipped),
            "skipped_files": self.skipped,
        }
