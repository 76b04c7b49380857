"""A run that stops at a checkpoint and goes on in a fresh `Parallel` is the run that never stopped, bit for bit."""

from __future__ import annotations

import pytest
import torch

from .conftest import Get


@pytest.mark.parametrize(("strategy", "cards"), [("single", 1), ("dp", 1), ("dp", 3), ("ddp", 1), ("ddp", 3)])
def test_resumes_bit_for_bit_with_dropout_and_shuffling_in_the_middle_of_an_epoch(
    get: Get, strategy: str, cards: int
) -> None:
    for result in get(strategy, cards, "resume"):
        assert result["parted"] == result["straight"]
        assert result["epoch"] == 1
        for name, tensor in result["final"].items():
            assert torch.equal(result["again"][name], tensor), name
