"""The host's limits: a container's count, the machine's don't."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from manycard.cards.host import read_host


def test_without_limits_the_host_is_the_machine(tmp_path: Path):
    host = read_host(cgroup=tmp_path)
    assert host.memory_total == psutil.virtual_memory().total
    assert 1 <= host.cores <= host.cores_total


def test_a_container_s_limits_count(tmp_path: Path):
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    host = read_host(cgroup=tmp_path)
    assert (host.cores, host.memory_total, host.memory_free) == (1, 1_000_000, 600_000)


@pytest.mark.parametrize("text", ["max 100000", "", "nonsense"])
def test_no_quota(tmp_path: Path, text: str):
    (tmp_path / "cpu.max").write_text(text)
    (tmp_path / "memory.max").write_text("max\n")
    limited, free = read_host(cgroup=tmp_path), read_host(cgroup=tmp_path / "none")
    assert (limited.cores, limited.memory_total) == (free.cores, free.memory_total)


def test_less_than_a_core_is_one(tmp_path: Path):
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert read_host(cgroup=tmp_path).cores == 1


def test_no_shared_memory(tmp_path: Path):
    host = read_host(shm=tmp_path / "none")
    assert (host.shm_total, host.shm_free) == (None, None)
