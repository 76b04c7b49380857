"""Do processes, one a card, find each other and add up? If not: which rank stands at which stage.

Behaviour:
    * Each rank is a process; it writes down what it is about to do. `join_ranks` waits for all of them.
    * When one fails, or all are not done in time, every rank is killed, and `RanksStuckError` says what each was
      doing that had not ended, and why one has failed.
    * Ranks meet at a store of the caller's, on the loopback interface and a free port.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

__all__ = ["RanksStuckError", "join_ranks"]

_LOOPBACK = "127.0.0.1"
_POLL = 0.05


class RanksStuckError(RuntimeError):
    """Ranks failed, or were not done in time."""


def join_ranks(devices: Sequence[str], seconds: float) -> float:
    """Start a rank a card, have them join a group and add up, and end them.

    Args:
        devices: torch's names of the cards; ``cpu`` for a simulated one, over gloo.
        seconds: how long it may take.

    Returns:
        the seconds it took.

    Raises:
        RanksStuckError: they did not all come to the end.
    """
    start = time.monotonic()
    store = TCPStore(_LOOPBACK, 0, len(devices), is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="manycard-ranks-") as name:
        folder = Path(name)
        ranks = [_start(folder, rank, len(devices), store.port, device) for rank, device in enumerate(devices)]
        try:
            while any(rank.poll() is None for rank in ranks):
                if any(rank.returncode not in (None, 0) for rank in ranks):
                    time.sleep(1)  # the others may fail of themselves, and say more
                    break
                if time.monotonic() > start + seconds:
                    break
                time.sleep(_POLL)
            wrong = [_describe(folder, rank, process) for rank, process in enumerate(ranks) if process.poll() != 0]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if wrong:
            raise RanksStuckError("; ".join(wrong))
    return time.monotonic() - start


def _start(folder: Path, rank: int, world_size: int, port: int, device: str) -> subprocess.Popen[bytes]:
    words = [str(folder / str(rank)), str(rank), str(world_size), str(port), device]
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "manycard.diagnosis.measuring.ranks", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "LOCAL_RANK": str(rank)},
        )


def _describe(folder: Path, rank: int, process: subprocess.Popen[bytes]) -> str:
    """What a rank was doing, and why it failed if it did."""
    try:
        doing = (folder / str(rank)).read_text(encoding="utf-8")
    except OSError:
        doing = "starting Python"
    if process.returncode is None:
        return f"rank {rank} waits at: {doing}"
    lines = (folder / f"{rank}.log").read_text(encoding="utf-8", errors="replace").split("\n")
    errors = [line for line in lines if "Error" in line.split(":")[0]]
    return f"rank {rank} failed at: {doing} ({(errors or [''])[-1][:200] or f'exit status {process.returncode}'})"


def _be_a_rank(file: str, rank: int, world_size: int, port: int, device: str) -> None:
    def about_to(what: str) -> None:
        Path(file).write_text(what, encoding="utf-8")

    about_to(f"starting CUDA on {device}" if device != "cpu" else "starting")
    if device != "cpu":
        torch.cuda.set_device(device)
    number = torch.ones(1, device=device)
    about_to("finding the other ranks")
    store = TCPStore(_LOOPBACK, port, world_size, is_master=False, timeout=timedelta(seconds=60))
    backend = "gloo" if device == "cpu" else "nccl"
    about_to(f"joining the group over {backend}")
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    about_to("an all-reduce")
    dist.all_reduce(number)
    if number.item() != world_size:
        raise RuntimeError(f"the sum of {world_size} ones came out as {number.item()}")
    about_to("leaving the group")
    dist.destroy_process_group()


if __name__ == "__main__":
    _be_a_rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
