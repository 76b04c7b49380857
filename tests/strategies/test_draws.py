"""Dropout draws differ between cards and between calls, and come again from the same seed."""

from __future__ import annotations

import pytest
import torch

from .conftest import Get
from .test_equivalence import ON


@pytest.mark.parametrize(("strategy", "cards"), ON)
def test_draws_differ_between_cards_and_repeat_from_a_seed(get: Get, strategy: str, cards: int) -> None:
    for result in get(strategy, cards, "draws"):
        first, again, other = result["masks"]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not torch.equal(first[0], first[1])
        assert not torch.equal(first[0], other[0])
        shards = first[0].tensor_split(cards)
        assert len({tuple(shard[0].tolist()) for shard in shards}) == cards


@pytest.mark.parametrize(("strategy", "cards"), ON)
def test_a_loader_of_ones_own_counts_as_global_batches(get: Get, strategy: str, cards: int) -> None:
    (alone,) = get("single", 1, "own_loader")
    assert len(alone) == 3
    for losses in get(strategy, cards, "own_loader"):
        assert losses == pytest.approx(alone, rel=1e-5)
