"""What loading costs on this machine: ``python benchmarks/loading.py [--rounds 7]`` prints the figures of docs/data.md.

Each figure is a median over rounds; within a round all ways take turns, so that a busy moment meets them alike.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

import manycard as mc
from manycard.data import Feed, GlobalLoader

SAMPLES, BATCH = 512, 32


def decode(index: int) -> torch.Tensor:
    """About a millisecond of one core, as a small image takes."""
    crc = index
    for _ in range(4):
        crc = zlib.crc32(_BYTES, crc)
    return torch.tensor([float(index), float(crc % 7)])


_BYTES = bytes(1 << 20)


class Decoded(Dataset[Any]):
    """Map-style, decoded as it is read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return decode(index)


class Stream(IterableDataset[Any]):
    """The same as a stream.

    Args:
        splits: whether workers take parts of it.
        raw: whether decoding is left to the collate function.
    """

    def __init__(self, *, splits: bool, raw: bool = False) -> None:
        self.splits, self.raw = splits, raw

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info() if self.splits else None
        numbers = range(SAMPLES) if info is None else range(info.id, SAMPLES, info.num_workers)
        yield from numbers if self.raw else map(decode, numbers)


def decode_all(indices: list[int]) -> Any:
    """A collate function that decodes."""
    return default_collate([decode(index) for index in indices])


def seconds(loader: Any) -> tuple[float, float]:
    """How long an epoch takes, and the time of cores that it and its workers use."""
    start, used = time.perf_counter(), _core_seconds()
    for _ in loader:
        pass
    return time.perf_counter() - start, _core_seconds() - used


def _core_seconds() -> float:
    """Time of cores used so far, by this process and by children that have ended."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def ours(source: Any, batch: int = BATCH, **settings: Any) -> GlobalLoader:
    """A loader of manycard's, as one process has it."""
    return GlobalLoader(source, batch, feed=Feed(), **settings)


def report(title: str, samples: int, ways: dict[str, Callable[[], Any]], rounds: int) -> None:
    """Print what each way gives a second, and the time of cores for each of it."""
    loaders = {name: make() for name, make in ways.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, loader in loaders.items():
            times[name].append(seconds(loader))
    print(f"\n{title}")
    for name, taken in times.items():
        rate = statistics.median(samples / wall for wall, _ in taken)
        cores = statistics.median(used / samples * 1e6 for _, used in taken)
        print(f"  {name:44}{rate:14,.0f} a second{cores:12,.3f} us of a core each")


class Stored(Dataset[Any]):
    """Samples that a storage takes 4 ms to give."""

    def __len__(self) -> int:
        return 1600

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.004)
        return torch.tensor(float(index))


def measured_workers(rounds: int) -> None:
    """Epochs of a script whose steps take 40 ms; "auto" searches in the first."""
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for workers in ("0", "auto", "2"):
            loader = ours(Stored(), 16, num_workers=workers if workers == "auto" else int(workers))
            for epoch in range(2):
                start = time.perf_counter()
                for _ in loader:
                    time.sleep(0.04)
                times.setdefault((workers, epoch), []).append(time.perf_counter() - start)
    print("\n100 batches of 16 samples from a slow storage, steps of 40 ms: seconds an epoch")
    for (workers, epoch), taken in times.items():
        print(f"  {workers:>4} workers, epoch {epoch}: {statistics.median(taken):.1f}")


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    measured_workers(min(rounds, 3))
    torch.set_num_threads(1)
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    map_style: dict[str, Callable[[], Any]] = {}
    for workers in (0, 1, 2):
        map_style[f"DataLoader, {workers} workers"] = lambda n=workers: DataLoader(Decoded(), BATCH, num_workers=n)
        map_style[f"parallel.loader, {workers} workers"] = lambda n=workers: ours(Decoded(), num_workers=n)
    report("map-style, 1 ms a sample: samples", SAMPLES, map_style, rounds)

    streams: dict[str, Callable[[], Any]] = {"1 worker": lambda: ours(Stream(splits=False), num_workers=1)}
    streams["2 workers, splits itself"] = lambda: ours(Stream(splits=True), num_workers=2)
    streams["2 workers, does not"] = lambda: ours(Stream(splits=False), num_workers=2)
    streams["2 workers, does not, decodes in collate_fn"] = lambda: ours(
        Stream(splits=False, raw=True), num_workers=2, collate_fn=decode_all
    )
    report("stream, 1 ms a sample: samples", SAMPLES, streams, rounds)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        np.random.default_rng(0).integers(0, 50_000, 20_000_000, dtype="uint16").tofile(path)
        blocks = mc.data.tokens(path, block=1024, vocab=50_000)
        ways = {
            f"{workers} workers": (lambda n=workers: ours(blocks, 32, shuffle=True, num_workers=n))
            for workers in (0, 1, 2)
        }
        report("blocks of 1,024 tokens, batches of 32, shuffled: tokens", len(blocks) * 1024, ways, rounds)


if __name__ == "__main__":
    main()
