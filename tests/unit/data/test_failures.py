"""Workers that end, and what can't be sent to them: named, soon, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import IterableDataset

from manycard.data import Feed, GlobalLoader
from manycard.errors import DataError, SettingError

from .datasets import Numbers, walk


class Killed(Numbers):
    """Its worker is killed at sample 6."""

    how: int = signal.SIGKILL

    def __getitem__(self, index: int) -> int:
        if index == 6:
            os.kill(os.getpid(), self.how)
            time.sleep(20)
        return index


class Exits(Numbers):
    """Its worker ends by itself at sample 6."""

    def __getitem__(self, index: int) -> int:
        if index == 6:
            os._exit(3)
        return index


class KilledStream(IterableDataset[int]):
    """A stream whose worker is killed at sample 6."""

    def __iter__(self) -> Iterator[int]:
        return (Killed(40)[index] for index in range(40))


def _no_worker_is_left(before: set[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, 5)
    return not alive


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (Killed(40), r"worker 1 \(process \d+\) was killed by SIGKILL, which is what the kernel does when memory"),
        (Exits(40), r"worker 1 \(process \d+\) ended by itself with status 3"),
        (KilledStream(), r"worker [01] \(process \d+\) was killed by SIGKILL"),
    ],
)
def test_a_worker_that_is_killed_is_named_within_ten_seconds(source: Any, named: str) -> None:
    before = set(psutil.Process().children(recursive=True))
    loader = GlobalLoader(source, 2, num_workers=2, prefetch_factor=1, feed=Feed())
    start = time.monotonic()
    with pytest.raises(DataError, match=named) as raised:
        walk(loader)
    assert time.monotonic() - start < 10
    assert "num_workers=0" in raised.value.fix
    assert _no_worker_is_left(before)


def _walk_and_kill(loader: GlobalLoader) -> None:
    """Kill a worker while the script is busy with the third batch."""
    for number, _ in enumerate(loader):
        if number == 3:
            next(each for each in psutil.Process().children() if "pt_data_worker" in each.name()).kill()
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                torch.zeros(3).sum()


def test_a_worker_that_is_killed_while_the_script_computes_is_named_too() -> None:
    """PyTorch raises in the middle of whatever the script does then, and names a process id."""
    loader = GlobalLoader(Numbers(400), 2, num_workers=2, feed=Feed())
    with pytest.raises(DataError, match=r"worker \d \(process \d+\) was killed by SIGKILL"):
        _walk_and_kill(loader)


def test_after_a_killed_worker_the_loader_walks_again() -> None:
    class Once(Killed):
        killed = torch.zeros(1, dtype=torch.int64).share_memory_()

        def __getitem__(self, index: int) -> int:
            if index == 6 and not int(self.killed):
                self.killed.fill_(1)
                return super().__getitem__(index)
            return index

    loader = GlobalLoader(Once(12), 2, num_workers=2, feed=Feed())
    with pytest.raises(DataError):
        walk(loader)
    loader.set_epoch(0)
    assert [sample for batch, _ in walk(loader) for sample in batch] == list(range(12))


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_what_cannot_be_pickled_is_said_with_the_start_method_and_who_chose_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A configuration library that changes the start method makes collate functions fail that worked before."""

    def local(samples: Any) -> Any:
        return samples

    given = GlobalLoader(Numbers(4), 2, num_workers=1, collate_fn=local, multiprocessing_context="spawn", feed=Feed())
    with pytest.raises(SettingError, match=r"started by 'spawn' \(the loader's multiprocessing_context\).*local"):
        list(given)
    monkeypatch.setattr("multiprocessing.context._default_context._actual_context", _spawn())
    chosen = GlobalLoader(Numbers(4), 2, num_workers=1, collate_fn=local, feed=Feed())
    with pytest.raises(SettingError, match=r"started by 'spawn' \(set for the whole process by .*a library\)"):
        list(chosen)


def _spawn() -> Any:
    import multiprocessing

    return multiprocessing.get_context("spawn")


class Fails(Numbers):
    """A mistake of the dataset's own."""

    def __getitem__(self, index: int) -> int:
        raise KeyError("no such image")


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_the_dataset_come_through_as_they_are(workers: int) -> None:
    with pytest.raises(KeyError, match="no such image"):
        list(GlobalLoader(Fails(4), 2, num_workers=workers, feed=Feed()))
