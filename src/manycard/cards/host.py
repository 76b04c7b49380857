"""The host that the cards sit in: cores, memory, and the shared memory that loaders and NCCL use.

What a container limits is what counts: the cores this process may run on and the container's quota, not what
the machine has. A figure that can't be read is None.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Host", "read_host"]


@dataclass(frozen=True)
class Host:
    """The host's cores and memory."""

    name: str
    """Its host name."""
    cores: int
    """Logical cores this process may use: its affinity, cut by the container's quota; at least 1."""
    cores_total: int
    """Logical cores of the machine."""
    memory_total: int
    """Bytes of memory, cut by the container's limit."""
    memory_free: int
    """Bytes that can be had without swapping."""
    shm_total: int | None
    """Bytes of ``/dev/shm``; None where there is none."""
    shm_free: int | None
    """Bytes free there."""


def read_host(cgroup: Path = Path("/sys/fs/cgroup"), shm: Path = Path("/dev/shm")) -> Host:
    """Read the host's cores and memory.

    Args:
        cgroup: where the container's limits stand (control groups, version 2).
        shm: where shared memory is mounted.
    """
    total = psutil.cpu_count(logical=True) or os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    memory = psutil.virtual_memory()
    limit = _number(cgroup / "memory.max")
    used = _number(cgroup / "memory.current")
    free = int(memory.available)
    if limit is not None and used is not None:
        free = max(min(free, limit - used), 0)
    shm_use = psutil.disk_usage(str(shm)) if shm.is_dir() else None
    return Host(
        name=socket.gethostname(),
        cores=max(min(affinity, _quota(cgroup / "cpu.max") or total), 1),
        cores_total=total,
        memory_total=min(int(memory.total), limit) if limit is not None else int(memory.total),
        memory_free=free,
        shm_total=int(shm_use.total) if shm_use else None,
        shm_free=int(shm_use.free) if shm_use else None,
    )


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # ValueError: "max", which is no limit
        return None


def _quota(file: Path) -> int | None:
    """Whole cores that a container's quota gives, or None without one."""
    try:
        quota, period = file.read_text().split()[:2]
        return max(int(quota) // int(period), 1)
    except (OSError, ValueError, ZeroDivisionError):
        return None
