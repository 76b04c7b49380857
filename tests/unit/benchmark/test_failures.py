"""A failed row says in one line why."""

from __future__ import annotations

import pytest
import torch

from manycard.benchmark.failures import describe_exit, describe_failure
from manycard.errors import LockstepError, RankFailed


def test_an_error_of_ours_is_shown_as_it_is() -> None:
    error = LockstepError("weight differs on cuda:1", fix="report it")
    assert describe_failure(error) == "weight differs on cuda:1. Fix: report it."


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...\nand more"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        MemoryError(),
        RankFailed(1, 1, "Traceback ...\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_running_out_of_memory_is_called_that(error: Exception) -> None:
    line = describe_failure(error)
    assert line.startswith("out of memory: ")
    assert "\n" not in line


def test_a_failed_rank_is_named_with_the_last_line_of_its_traceback() -> None:
    error = RankFailed(3, 1, "Traceback (most recent call last):\n  ...\nValueError: no such thing\n")
    assert describe_failure(error) == "rank 3: ValueError: no such thing"
    assert "rank 3" in describe_failure(RankFailed(3, -9, ""))


def test_a_process_that_left_no_result_is_described_by_how_it_ended() -> None:
    assert "SIGKILL" in describe_exit(-9, "")
    assert describe_exit(-11, "noise\nFatal Python error\n") == "the process was ended by SIGSEGV: Fatal Python error"
    assert describe_exit(7, "") == "the process exited with status 7"


def test_a_long_message_is_cut() -> None:
    assert len(describe_failure(ValueError("x" * 5000))) <= 300
