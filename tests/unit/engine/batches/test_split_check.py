"""A split that loses or repeats samples is refused; one that uses each once passes, however it looks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from manycard.cards import choose_cards
from manycard.engine.batches.cutting import SplitCutter
from manycard.engine.batches.split_check import LOOKED_AT
from manycard.errors import BatchError

CARDS = choose_cards("cpu:2").cards
Rows = Callable[[Tensor], Any]


def padded(lengths: list[int], width: int, padding: float) -> Tensor:
    """A row of its own for each length."""
    rows = torch.full((len(lengths), width), padding)
    for row, length in enumerate(lengths):
        rows[row, :length] = torch.arange(1.0, length + 1) + 10 * row
    return rows


def cut(batch: Any, *shards: Any, times: int = 1, check: bool = True) -> None:
    cutter = SplitCutter(lambda batch, cards: list(shards), check=check)
    for _ in range(times):
        cutter.cut(batch, CARDS)


X, Y = torch.arange(12.0).reshape(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])


def by_rows(*rows: list[int]) -> tuple[Any, ...]:
    """Shards of (X, Y) with these rows."""
    return ((X, Y), *((X[some], Y[some]) for some in rows))


def test_a_split_in_any_order_passes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cut(*by_rows([5, 0, 3], [1, 4, 2]))
        cut(*by_rows([5, 0, 3, 1, 4, 2], []))
        cut((X, Y), None, (X, Y))
        cut({"x": X, "n": 3}, {"x": X[:1], "n": 3}, {"x": X[1:], "n": 3})


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (([0, 1], [3, 4]), "loses samples: the batch has 6, its shards have 4"),
        (([0, 1, 2, 3], [3, 4, 5]), "repeats samples: the batch has 6, its shards have 7"),
        (([0, 1, 2], [2, 4, 5]), "1 are in no shard, sample 3 among them"),
        (([0, 1, 2], [0, 1, 2]), "3 are in no shard, sample 3 among them, and 3"),
    ],
)
def test_lost_and_repeated_samples_are_refused(rows: Any, words: str) -> None:
    with pytest.raises(BatchError, match=words):
        cut(*by_rows(*rows))
    with pytest.raises(BatchError, match="Fix: give each sample to one card"):
        cut(*by_rows(*rows))


def test_inputs_beside_other_samples_labels_are_refused() -> None:
    with pytest.raises(BatchError, match="parts of several samples"):
        cut((X, Y), (X[:3], Y[3:]), (X[3:], Y[:3]))


def test_equal_samples_need_not_be_told_apart() -> None:
    x = torch.tensor([[1.0], [1.0], [2.0]])
    cut(x, x[[0]], x[[0, 2]])
    with pytest.raises(BatchError, match="1 are in no shard"):
        cut(x, x[[0]], x[[2, 2]])


@pytest.mark.parametrize("padding", [0.0, -100.0])
def test_rows_may_lose_their_padding(padding: float) -> None:
    batch = padded([5, 1, 3, 2], 5, padding)
    good = [batch[[1, 3], :2], batch[[0, 2]]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cut(
            (batch, torch.arange(4)), *[(part, torch.tensor(i)) for part, i in zip(good, [[1, 3], [0, 2]], strict=True)]
        )
        cut(batch, *good)
    with pytest.raises(BatchError, match="1 are in no shard, sample 3"):
        cut(batch, batch[[1, 1], :2], batch[[0, 2]])


def test_words_that_are_cut_off_are_seen() -> None:
    batch = padded([5, 1, 3, 2], 5, 0.0)
    with pytest.raises(BatchError, match="are in no shard"):
        cut(batch, batch[[0, 1], :4], batch[[2, 3], :3])


def test_lists_of_samples_of_different_sizes() -> None:
    samples = [torch.full((size, 2), float(size)) for size in (1, 2, 3, 4)]
    cut(samples, samples[2:], samples[:2])
    cut((samples, ["a", "b", "c", "d"]), (samples[2:], ["c", "d"]), (samples[:2], ["a", "b"]))
    with pytest.raises(BatchError, match="sample 3"):
        cut(samples, samples[2:3] * 2, samples[:2])
    equal = [torch.full((3, 2), float(number)) for number in range(2)]  # as long as two fields of three samples
    cut([*equal, torch.zeros(4, 2)], equal, [torch.zeros(4, 2)])


def test_what_the_split_has_changed_is_left_out_of_the_comparison() -> None:
    """Scaled inputs can't be found again; their labels can."""
    cut((X, Y), (X[:3] * 2 + 0.5, Y[:3]), (X[3:] * 2 + 0.5, Y[3:]))
    with pytest.warns(UserWarning, match="only the number of samples is checked"):
        cut(X, X[:3] * 2 + 0.5, X[3:] * 2 + 0.5, times=3)


def test_content_is_compared_in_the_first_batches_and_counts_in_all() -> None:
    given: list[list[int]] = []
    cutter = SplitCutter(lambda batch, cards: [X[given[-1]], X[[3, 4, 5]]], check=True)
    given.append([0, 1, 2])
    for _ in range(LOOKED_AT):
        cutter.cut(X, CARDS)
    given.append([0, 1, 1])
    cutter.cut(X, CARDS)  # no longer looked at
    given.append([0, 1])
    with pytest.raises(BatchError, match="loses samples"):
        cutter.cut(X, CARDS)


def test_the_check_can_be_switched_off() -> None:
    cut(*by_rows([0, 1], [1, 2]), check=False)


@dataclass(frozen=True)
class Pair:
    x: Tensor
    y: Tensor


class Holder:
    """An object whose samples can't be counted."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_dataclasses_and_objects() -> None:
    cut(Pair(X, Y), Pair(X[:2], Y[:2]), Pair(X[2:], Y[2:]))
    with pytest.raises(BatchError, match="in no shard"):
        cut(Pair(X, Y), Pair(X[:2], Y[:2]), Pair(X[1:5], Y[1:5]))
    cutter = SplitCutter(lambda batch, cards: [Holder(X), None], check=True)
    assert cutter.cut(Holder(X), CARDS).sizes == [1, 0]
    assert not cutter.counted


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        ([X], "split returned 1 shards for 2 cards"),
        ([X, X, X], "split returned 3 shards for 2 cards"),
        (X, "split returned a Tensor, not a list"),
        (None, "split returned a NoneType, not a list"),
        ([None, X[:0]], "2 shards without a sample in any"),
        ([[], ()], "2 shards without a sample in any"),
    ],
)
def test_what_is_no_list_of_shards_is_refused(shards: Any, words: str) -> None:
    with pytest.raises(BatchError, match=words):
        SplitCutter(lambda batch, cards: shards, check=True).cut(X, CARDS)
