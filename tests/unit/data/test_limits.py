"""What workers need of the machine is compared with what is there, and said with the sum."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import resource
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import IterableDataset

from manycard.data import Feed, GlobalLoader, limits
from manycard.data.limits import Limits, own_bytes, read_limits
from manycard.errors import SettingError

from .datasets import Numbers, walk


class Images(Numbers):
    """Samples of 1 MiB."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((1 << 18,), float(index))


class ImageStream(IterableDataset[Any]):
    """The same as a stream."""

    def __iter__(self) -> Iterator[Any]:
        return (Images(32)[index] for index in range(32))


class ManyTensors(Numbers):
    """Samples of 50 tensors."""

    def __getitem__(self, index: int) -> Any:
        return [torch.tensor([float(index)])] * 50


@pytest.mark.parametrize("source", [Images(32), ImageStream()])
def test_shared_memory_that_cannot_hold_the_workers_batches_is_said_before_any_is_used(
    source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch ends in a bus error."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    real = limits.shutil.disk_usage
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda path: real(path)._replace(free=60 << 20))
    loader = GlobalLoader(source, 8, num_workers=2, prefetch_factor=2, feed=Feed())
    with pytest.raises(SettingError) as raised:
        list(loader)
    assert "2 workers x prefetch_factor 2 x 8.0 MiB a batch x 2 ranks = 64.0 MiB of shared memory" in str(raised.value)
    assert "/dev/shm has 60.0 MiB free" in str(raised.value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert len(list(loader)) == 4, "32 MiB fit"


def test_open_files_that_the_workers_batches_need_are_counted_before_they_run_out() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    loader = GlobalLoader(ManyTensors(32), 2, num_workers=2, prefetch_factor=4, feed=Feed())
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 200, hard))
        with pytest.raises(SettingError, match=r"2 workers x prefetch_factor 4 x 50 tensors a batch = 400 open files"):
            list(loader)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(walk_lists(loader)) == 16


def walk_lists(loader: GlobalLoader) -> list[int]:
    """One epoch of batches that are lists."""
    return [len(batch) for batch in loader]


def test_no_limit_is_looked_at_without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.shutil, "disk_usage", _must_not_be_called)
    assert len(walk(GlobalLoader(Numbers(4), 2, feed=Feed()))) == 2


def _must_not_be_called(*_: Any) -> None:
    raise AssertionError("nothing is shared")


def test_what_is_free_is_read_from_this_machine() -> None:
    found = read_limits(3, 2)
    assert (found.workers, found.prefetch, found.ranks) == (3, 2, 1)
    assert found.shm_free is None or found.shm_free > 0
    assert found.files_free is None or found.files_free > 0


def test_a_batch_is_measured_by_its_tensors() -> None:
    tight = Limits(1, 1, 1, 4096 * 3 - 1, None)
    assert tight.refuse({"a": [torch.zeros(3), torch.zeros(4000, dtype=torch.uint8)], "b": "text"}) is None
    assert tight.refuse({"a": [torch.zeros(3), torch.zeros(5000, dtype=torch.uint8)]}) is not None


def test_a_single_batch_that_is_larger_than_shared_memory_is_not_even_made(monkeypatch: pytest.MonkeyPatch) -> None:
    real = limits.shutil.disk_usage
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda path: real(path)._replace(free=7 << 20))
    loader = GlobalLoader(Images(32), 8, num_workers=1, collate_fn=_must_not_be_called, feed=Feed())
    with pytest.raises(SettingError, match=r"1 workers x prefetch_factor 2 x 8.0 MiB a batch = 16.0 MiB"):
        list(loader)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_process_that_was_narrowed_to_one_core_says_so_when_workers_share_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    loader = GlobalLoader(Numbers(8), 2, num_workers=2, feed=Feed())
    with pytest.warns(UserWarning, match=r"2 loader workers will share 1 of the machine's 16 cores: .* core 0 only"):
        walk(loader)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*loader workers will share")
        walk(loader)  # said once


class HoldsPaths(Numbers):
    """Holds a list of Python strings."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.paths = [f"/data/images/{index:012d}.jpg" for index in range(length)]
        self.boxes = {index: (0.5, [index] * 4) for index in range(length // 10)}


def test_python_objects_that_every_worker_comes_to_copy_are_weighed_against_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading a list's items writes their reference counts, which copies the pages: memory grows with the workers."""
    data = HoldsPaths(20_000)
    monkeypatch.setattr(limits, "_LEAST_TO_SAY", 1 << 20)
    host = limits.read_host()
    monkeypatch.setattr(limits, "read_host", lambda: dataclasses.replace(host, memory_free=4 << 20))
    with pytest.warns(UserWarning, match=r"2 workers x about .* MiB \(Python objects of the dataset.* are free"):
        walk(GlobalLoader(data, 10_000, num_workers=2, feed=Feed()))
    data.paths, data.boxes = [], {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        walk(GlobalLoader(data, 10_000, num_workers=2, feed=Feed()))


def test_the_estimate_is_near_what_the_objects_take() -> None:
    paths = [f"/data/images/{index:012d}.jpg" for index in range(50_000)]
    assert own_bytes(paths, arrays=False) == pytest.approx(50_000 * (8 + 78), rel=0.1)
    assert own_bytes({"paths": paths}, arrays=False) == pytest.approx(50_000 * (8 + 78), rel=0.1)
    array = np.zeros(1000)
    assert own_bytes([array], arrays=False) < 200
    assert own_bytes([array], arrays=True) > 8000
    assert own_bytes(torch.zeros(10_000), arrays=True) == 0, "tensors are sent as shared memory"


class CountsThreads(Numbers):
    """What a worker computes with."""

    def __getitem__(self, index: int) -> Any:
        import threadpoolctl

        pools = [pool["num_threads"] for pool in threadpoolctl.threadpool_info()]
        return torch.tensor([torch.get_num_threads(), max(pools)])


def test_every_worker_computes_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("threadpoolctl") is None:
        pytest.skip("threadpoolctl is not installed")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        batches = walk(GlobalLoader(CountsThreads(4), 2, num_workers=2, feed=Feed()))
    finally:
        torch.set_num_threads(before)
    assert {tuple(row) for batch, _ in batches for row in batch} == {(1, 1)}
