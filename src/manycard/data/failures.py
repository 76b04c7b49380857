"""Failures of workers, in words: which worker, how it ended, and what to do.

Behaviour:
    * A worker that is killed, or ends by itself, gives a `DataError` with its number, process id and how it ended: at
      once where a signal tells (in the main thread, whatever it does then, as PyTorch has it), else within the 5
      seconds in which PyTorch looks.
    * Workers that can't be started because something can't be pickled give a `SettingError` that names the start
      method and where it comes from.
    * Files and shared memory that run out meanwhile, which `manycard.data.limits` could not foresee (batches that the
      script keeps, other programs), say so.
    * Errors of the dataset's own come through as they are.
"""

from __future__ import annotations

import errno
import multiprocessing
import pickle
import re
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from manycard.errors import DataError, SettingError

__all__ = ["starting_workers", "watch_workers", "worker_failure"]

_HOW = {
    signal.SIGKILL: "which is what the kernel does when memory has run out",
    signal.SIGBUS: "which is what happens when /dev/shm is full",
    signal.SIGSEGV: "which is a fault in compiled code that the dataset calls",
}


@contextmanager
def starting_workers(loader: DataLoader[Any]) -> Iterator[None]:
    """Name what can't be sent to workers.

    Raises:
        SettingError: the start method needs it pickled, and it can't be.
    """
    try:
        yield
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        method, said_by = _start_method(loader)
        if method == "fork" or "pickle" not in f"{type(error).__name__} {error}".lower():
            raise
        raise SettingError(
            "num_workers",
            loader.num_workers,
            f"workers are started by {method!r} ({said_by}), which pickles the dataset, collate_fn and "
            f"worker_init_fn, and that failed: {error}",
            fix="define them at the top level of a module (no lambda, no function in a function), or give "
            "multiprocessing_context='fork'",
        ) from error


def _start_method(loader: DataLoader[Any]) -> tuple[str, str]:
    """How workers start, and who says so."""
    context: Any = loader.multiprocessing_context
    if context is not None:
        return context.get_start_method(), "the loader's multiprocessing_context"
    chosen = multiprocessing.get_start_method(allow_none=True)
    default = multiprocessing.get_context(None).get_start_method() if chosen is None else chosen
    usual = multiprocessing.get_all_start_methods()[0]
    if chosen is not None and chosen != usual:
        return chosen, "set for the whole process by multiprocessing.set_start_method, in the script or a library"
    return default, "this Python's default"


_walking: weakref.WeakKeyDictionary[Any, weakref.ref[DataLoader[Any]]] = weakref.WeakKeyDictionary()
"""Iterations with workers, and whose they are (which may hold them: both are held weakly)."""


def watch_workers(loader: DataLoader[Any], loaded: Any) -> None:
    """Have an iteration's workers named also where PyTorch hears of their end between two batches.

    PyTorch handles SIGCHLD and raises there; this stands before its handler, and names what it raises.
    """
    if not getattr(loaded, "_workers", None):
        return
    _walking[loaded] = weakref.ref(loader)
    handler: Any = signal.getsignal(signal.SIGCHLD)
    if threading.current_thread() is threading.main_thread() and callable(handler) and not _is_ours(handler):
        signal.signal(signal.SIGCHLD, partial(_on_child, handler))


def _is_ours(handler: Any) -> bool:
    return isinstance(handler, partial) and handler.func is _on_child


def _on_child(handler: Callable[[int, Any], Any], signum: int, frame: Any) -> None:
    try:
        handler(signum, frame)
    except RuntimeError as error:
        for loaded, held in list(_walking.items()):
            loader = held()
            found = None if loader is None else _worker_error(loader, loaded, error)
            if found is not None:
                raise found from error
        raise


def worker_failure(loader: DataLoader[Any], loaded: Any, error: Exception) -> DataError | None:
    """What an error of PyTorch's means: which worker has failed, and how, or why its batches can't be received.

    Args:
        loader: whose workers they are.
        loaded: the iterator that was asked for a batch.
        error: what it raised.

    Returns:
        None where it is no failure of a worker's.
    """
    return _worker_error(loader, loaded, error) or _exhausted(error)


def _worker_error(loader: DataLoader[Any], loaded: Any, error: Exception) -> DataError | None:
    listed = re.match(r"DataLoader worker \(pid(?:\(s\))?:? ([\d, ]+)\)", str(error))
    if listed is None:
        return None
    pids = [int(pid) for pid in listed[1].split(",")]
    ended = []
    for number, process in enumerate(getattr(loaded, "_workers", ())):
        if process.pid in pids:
            process.join(1)
            ended.append(f"worker {number} (process {process.pid}) {_ending(process.exitcode)}")
    if not ended:
        return None
    method = _start_method(loader)[0]
    sent = "" if method == "fork" else f"; workers are started by {method!r}, and what it wrote to standard error"
    return DataError(
        f"{'; '.join(ended)}, before the epoch did{sent and sent + ' says more'}",
        fix="run with num_workers=0 to see an error of the dataset's own; if memory ran out, use fewer workers",
    )


def _ending(code: int | None) -> str:
    if code is None:
        return "no longer answers"
    if code >= 0:
        return f"ended by itself with status {code}"
    try:
        name = signal.Signals(-code)
    except ValueError:
        return f"was killed by signal {-code}"
    hint = _HOW.get(name)
    return f"was killed by {name.name}" + (f", {hint}" if hint else "")


def _exhausted(error: Exception) -> DataError | None:
    text = str(error)
    if getattr(error, "errno", None) == errno.EMFILE or re.search(r"[Tt]oo many open files|ancdata", text):
        return DataError(
            "no further file can be opened, and each tensor of a batch from a worker holds one while it lives",
            fix="keep copies (tensor.clone()) of what the script collects, raise the limit (ulimit -n), or call "
            "torch.multiprocessing.set_sharing_strategy('file_system')",
        )
    if re.search(r"shared memory|No space left", text) and torch.utils.data.get_worker_info() is None:
        return DataError(
            f"shared memory has run out: {text.splitlines()[0]}",
            fix="give /dev/shm more (docker run --shm-size=...), or use fewer workers or a smaller prefetch_factor",
        )
    return None
