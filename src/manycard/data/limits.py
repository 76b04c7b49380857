"""What loader workers need of the machine, and whether it is there: shared memory, open files, memory, cores.

Behaviour:
    * Each worker measures its first batch before it sends any, and what all workers of this machine's ranks will hold
      at most (workers x prefetch_factor x batch) is compared with what was free before they started. Where it doesn't
      fit, the run ends with the sum and the fix, not with a bus error or "Too many open files" in the middle.
    * Python objects of the dataset that each worker will own a copy of in the end (reading one writes its reference
      count, which copies its memory page), and what a spawned worker is sent, are estimated by sampling. More than the
      machine has free is a warning: it is an estimate.
    * More workers than cores this process may run on is a warning that names the cores: a library that narrowed the
      process to one core is the usual cause of loaders that get slower with more workers.

The dataset is never read in the script's process for this: what it opens there would be shared by forked workers.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from manycard.cards.host import read_host
from manycard.data.parts import Refused
from manycard.errors import SettingError

__all__ = ["Checked", "Limits", "cores_for_workers", "local_ranks", "read_limits", "warn_of_copies", "warn_of_cores"]

_SHM = "/dev/shm"
_PAGE = 4096
_SPARE_FILES = 32
"""Open files left for the script itself."""


@dataclass(frozen=True)
class Limits:
    """What was free before workers started."""

    workers: int
    """Workers of this rank."""
    prefetch: int
    """Batches that each reads ahead."""
    ranks: int
    """Ranks on this machine, each with as many workers."""
    shm_free: int | None
    """Bytes free in ``/dev/shm``; None where batches don't go through it."""
    files_free: int | None
    """Files that this process may still open; None where batches need none."""

    def fits_once(self, samples: Any) -> bool:
        """Whether shared memory can hold one batch of `samples`: PyTorch's collate functions write it there."""
        size = sum(each.nbytes for each in _arrays(samples))
        return self.shm_free is None or size <= self.shm_free

    def refuse(self, batch: Any) -> SettingError | None:
        """The error that batches like `batch` would end in; None where they fit."""
        tensors = [each for each in _arrays(batch) if isinstance(each, Tensor)]
        held = self.workers * self.prefetch
        size = sum(math.ceil(max(each.nbytes, 1) / _PAGE) * _PAGE for each in tensors)
        return self._refuse_size(held, size) or self._refuse_files(held, len(tensors))

    def _refuse_size(self, held: int, size: int) -> SettingError | None:
        need = held * size * self.ranks
        if self.shm_free is not None and need > self.shm_free:
            across = f" x {self.ranks} ranks" if self.ranks > 1 else ""
            return SettingError(
                "num_workers",
                self.workers,
                f"{self.workers} workers x prefetch_factor {self.prefetch} x {_bytes(size)} a batch{across} = "
                f"{_bytes(need)} of shared memory, and {_SHM} has {_bytes(self.shm_free)} free",
                fix=f"give {_SHM} at least {_bytes(need)} (docker run --shm-size=...), or use fewer workers, a smaller "
                "prefetch_factor or smaller batches",
            )
        return None

    def _refuse_files(self, held: int, tensors: int) -> SettingError | None:
        files = held * tensors
        if self.files_free is not None and files > self.files_free - _SPARE_FILES:
            return SettingError(
                "num_workers",
                self.workers,
                f"{self.workers} workers x prefetch_factor {self.prefetch} x {tensors} tensors a batch = {files} "
                f"open files, and this process may open {max(self.files_free - _SPARE_FILES, 0)} more",
                fix="raise the limit (ulimit -n), join tensors in collate_fn, or call "
                "torch.multiprocessing.set_sharing_strategy('file_system')",
            )
        return None


def _arrays(batch: Any, depth: int = 6) -> list[Any]:
    """The tensors and arrays of a batch, whatever it is made of."""
    if isinstance(batch, Tensor | np.ndarray):
        return [batch]
    if depth == 0 or isinstance(batch, str | bytes | int | float | type):
        return []
    if isinstance(batch, Mapping):
        parts: Any = batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch
    else:
        parts = getattr(batch, "__dict__", {}).values()
    return [array for part in parts for array in _arrays(part, depth - 1)]


class Checked:
    """A collate function that, in a worker, measures the first batch it makes.

    Args:
        collate: the user's, or PyTorch's.

    Attributes:
        limits: set before workers start; None where nothing is to be checked.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate
        self.limits: Limits | None = None

    def __call__(self, samples: Any) -> Any:
        if isinstance(samples, Refused):
            return samples
        limits = self.limits
        if limits is None or torch.utils.data.get_worker_info() is None:
            return self.collate(samples)
        self.limits = None
        error = None if limits.fits_once(samples) else limits.refuse(_as_tensors(samples))
        if error is None:
            batch = self.collate(samples)
            error = limits.refuse(batch)
        return batch if error is None else Refused(error)


def _as_tensors(samples: Any) -> list[Tensor]:
    """What samples come to where they can't be collated: one tensor as large as all of them."""
    return [torch.empty(0).new_empty(1).expand(max(sum(each.nbytes for each in _arrays(samples)) // 4, 1))]


def local_ranks() -> int:
    """Ranks on this machine."""
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def cores_for_workers() -> int:
    """Cores that the workers of one rank may fill."""
    return max(read_host().cores // local_ranks(), 1)


def read_limits(workers: int, prefetch: int) -> Limits:
    """What is free now."""
    through_shm = sys.platform == "linux" and os.path.isdir(_SHM)
    by_file = torch.multiprocessing.get_sharing_strategy() == "file_descriptor"  # type: ignore[no-untyped-call]
    return Limits(
        workers,
        prefetch,
        local_ranks(),
        shutil.disk_usage(_SHM).free if through_shm else None,
        _files_free() if by_file else None,
    )


def _files_free() -> int | None:
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return None if limit == resource.RLIM_INFINITY else limit - psutil.Process().num_fds()
    except (ImportError, OSError, AttributeError, psutil.Error):
        return None


# ---- cores and memory ------------------------------------------------------------------------------------------


def warn_of_cores(workers: int) -> None:
    """Say where workers outnumber the cores that this process may run on."""
    if not hasattr(os, "sched_getaffinity"):
        return
    allowed, total = sorted(os.sched_getaffinity(0)), os.cpu_count() or 1
    ranks = local_ranks()
    if workers * ranks <= len(allowed) or len(allowed) == total:
        return
    shown = ", ".join(map(str, allowed[:8])) + (", ..." if len(allowed) > 8 else "")
    warnings.warn(
        f"{workers * ranks} loader workers will share {len(allowed)} of the machine's {total} cores: this process may "
        f"run on core {shown} only. If nobody asked for that, a library narrowed it when it was imported; "
        f"os.sched_setaffinity(0, range({total})) before the loader is walked widens it again",
        stacklevel=2,
    )


def warn_of_copies(dataset: Any, workers: int, *, sent: bool) -> None:
    """Say where the workers' own copies of the dataset may not fit into memory.

    Args:
        sent: whether workers are sent the dataset (spawn, forkserver), and so own its arrays too.
    """
    each = 0
    with contextlib.suppress(Exception):  # an estimate of objects of any kind must end no run
        each = own_bytes(dataset, arrays=sent)
    everywhere = workers * local_ranks()
    if each * everywhere < _LEAST_TO_SAY:
        return
    free = read_host().memory_free
    if each * everywhere > free:
        what = "the dataset as it is sent" if sent else "Python objects of the dataset"
        warnings.warn(
            f"{everywhere} workers x about {_bytes(each)} ({what}, of which each worker comes to own a copy) = "
            f"{_bytes(each * everywhere)} of memory, and {_bytes(free)} are free. Hold the samples in NumPy arrays or "
            "tensors instead of lists and dicts, map them from a file, or use fewer workers",
            stacklevel=2,
        )


_LEAST_TO_SAY = 1 << 28
_SAMPLED = 64


def own_bytes(value: Any, *, arrays: bool, depth: int = 5) -> int:
    """About how many bytes of Python objects `value` holds; collections are measured by a few of their items."""
    if isinstance(value, np.memmap) or depth == 0:
        return 0
    if isinstance(value, np.ndarray):
        items = value.ravel()[:_SAMPLED].tolist() if value.dtype == object else []
        return (int(value.nbytes) if arrays else 0) + _of_items(items, value.size, arrays, depth)
    if isinstance(value, Tensor):
        return 0
    if isinstance(value, dict):  # not any mapping: a file may be one
        pairs = list(itertools.islice(value.items(), _SAMPLED))
        return _size(value) + _of_items([part for pair in pairs for part in pair], 2 * len(value), arrays, depth)
    if isinstance(value, list | tuple | set | frozenset):
        return _size(value) + _of_items(_spread(value), len(value), arrays, depth)
    if isinstance(value, str | bytes | bytearray | int | float | complex | bool | type(None)):
        return _size(value)
    held = getattr(value, "__dict__", None)
    return _size(value) + (own_bytes(held, arrays=arrays, depth=depth - 1) if type(held) is dict else 0)


def _spread(items: Any) -> list[Any]:
    if isinstance(items, list | tuple):
        return list(items[:: max(len(items) // _SAMPLED, 1)][:_SAMPLED])
    return list(itertools.islice(items, _SAMPLED))


def _of_items(some: list[Any], count: int, arrays: bool, depth: int) -> int:
    if not some:
        return 0
    return int(sum(own_bytes(item, arrays=arrays, depth=depth - 1) for item in some) / len(some) * count)


def _size(value: Any) -> int:
    try:
        return sys.getsizeof(value)
    except TypeError:
        return 0


def _bytes(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
