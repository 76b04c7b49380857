"""What runs first in each worker.

Behaviour:
    * ``get_worker_info()`` shows the user's own dataset, not manycard's around it, and the user's ``worker_init_fn``
      runs after that.
    * Every pool of threads that can be told computes with one thread: PyTorch's (by PyTorch itself), OpenMP's and
      BLAS's where ``threadpoolctl`` is installed, OpenCV's where it is imported. Workers are what uses the cores; pools
      of their own would be cores x workers threads.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable

from torch.utils.data import get_worker_info

from manycard.data.draws import SeededSamples
from manycard.data.streams import StreamReader, watch_worker

__all__ = ["StartWorker"]


class StartWorker:
    """The ``worker_init_fn`` of PyTorch's DataLoader.

    Args:
        user: the user's own; None without one.
    """

    def __init__(self, user: Callable[[int], object] | None) -> None:
        self._user = user

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None, "this runs in workers only"
        _one_thread_each()
        streams = isinstance(info.dataset, StreamReader)
        if isinstance(info.dataset, SeededSamples | StreamReader):
            # WorkerInfo is frozen; its own dataset is what functions given as worker_init_fn open files on.
            object.__setattr__(info, "dataset", info.dataset.dataset)

        def prepare() -> None:
            if self._user is not None:
                self._user(worker)

        if streams:
            watch_worker(info, prepare)
        else:
            prepare()


def _one_thread_each() -> None:
    with contextlib.suppress(ImportError):
        importlib.import_module("threadpoolctl").threadpool_limits(1)
    opencv = sys.modules.get("cv2")
    if opencv is not None:
        opencv.setNumThreads(0)
