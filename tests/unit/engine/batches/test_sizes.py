"""Whole samples by weight: largest remainders, every sample once, equal weights as `dp` cuts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manycard.engine.batches.sizes import shard_sizes, weighted_sizes


@pytest.mark.parametrize(
    ("samples", "weights", "sizes"),
    [
        (9, [2, 1], [6, 3]),
        (10, [2, 1], [7, 3]),
        (8, [5, 2, 1], [5, 2, 1]),
        (4, [5, 2, 1], [3, 1, 0]),  # 2.5, 1, 0.5: the first of two equal remainders
        (11, [3, 1], [8, 3]),
        (10, [0.1, 0.2, 0.7], [1, 2, 7]),  # 0.1 + 0.2 + 0.7 is not 1 in floats
        (3, [1, 1, 1, 1], [1, 1, 1, 0]),
        (2, [1, 1000], [1, 1]),  # the primary always gets one
        (1, [1, 3], [1, 0]),
        (7, [1e-9, 1], [1, 6]),
        (0, [1, 2], [0, 0]),
    ],
)
def test_known_sizes(samples: int, weights: list[float], sizes: list[int]) -> None:
    assert weighted_sizes(samples, weights) == sizes


@given(st.integers(0, 500), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8))
def test_sizes_add_up_and_are_less_than_a_sample_from_the_weights(samples: int, weights: list[float]) -> None:
    sizes = weighted_sizes(samples, weights)
    assert sum(sizes) == samples
    assert all(size >= 0 for size in sizes)
    quotas = [samples * weight / sum(weights) for weight in weights]
    given_away = samples > 0 and quotas[0] < 1 and sizes[0] == 1  # the primary's only sample
    room = 2 if given_away else 1
    assert all(abs(size - quota) < room + 1e-9 for size, quota in zip(sizes, quotas, strict=True))


@given(st.integers(0, 300), st.integers(1, 8), st.floats(1e-6, 1e6))
def test_equal_weights_are_even_shards(samples: int, cards: int, weight: float) -> None:
    assert weighted_sizes(samples, [weight] * cards) == shard_sizes(samples, cards)


def test_everyone_gets_a_sample_where_there_are_enough() -> None:
    assert weighted_sizes(8, [100, 1, 1], everyone=True) == [6, 1, 1]
    assert weighted_sizes(2, [100, 1, 1], everyone=True) == [2, 0, 0]
