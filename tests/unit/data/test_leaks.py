"""Three epochs: each sample once in each, and no memory, file, shared segment, thread or process more at the end."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from manycard.data import Feed, GlobalLoader

from .datasets import Augmented, Stream


class Wide(Augmented):
    """Samples of 256 KiB."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((1 << 16,), float(index))


class WideStream(Stream):
    """The same as a stream that its workers split."""

    def __iter__(self) -> Any:
        numbers = super().__iter__()
        return (torch.full((1 << 16,), float(number)) for number in numbers)


def _held() -> dict[str, int]:
    gc.collect()
    process = psutil.Process()
    return {
        "MiB of memory": process.memory_info().rss >> 20,
        "open files": process.num_fds(),
        "processes": len(process.children(recursive=True)),
        "threads": threading.active_count(),
        "shared segments": Path("/proc/self/maps").read_text().count("/dev/shm/torch_"),
    }


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("source", [Wide(96), WideStream(96)])
def test_three_epochs_lose_no_sample_and_leak_nothing(source: Any, persistent: bool) -> None:
    loader = GlobalLoader(source, 8, num_workers=2, persistent_workers=persistent, feed=Feed())
    seen = [_epoch(loader)]
    before = _held()
    seen += [_epoch(loader) for _ in range(3)]
    after = _held()
    assert seen == [list(range(96))] * 4
    grown = {name: after[name] - before[name] for name in before}
    # An epoch is 24 MiB: one that stayed would show.
    assert grown.pop("MiB of memory") < 12
    assert all(more <= 0 for more in grown.values()), grown


def _epoch(loader: GlobalLoader) -> list[int]:
    return sorted(int(row[0]) for batch in loader for row in batch)


def test_epochs_that_are_broken_off_leave_nothing() -> None:
    loader = GlobalLoader(Wide(96), 8, num_workers=2, feed=Feed())
    for _ in loader:
        break
    before = _held()
    for _ in range(3):
        for _ in loader:
            break
    after = _held()
    assert all(after[name] - before[name] <= (8 if name == "MiB of memory" else 0) for name in before), (before, after)
