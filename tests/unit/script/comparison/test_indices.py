"""Indices out of bounds raise before a kernel sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manycard.script.comparison.indices import CheckedIndices

X = torch.arange(16.0).reshape(4, 4)


def _all(index: int, *shape: int) -> Tensor:
    return torch.full(shape, index)


OUTSIDE: dict[str, Callable[[], Any]] = {
    "index": lambda: X[_all(4, 2)],
    "index_negative": lambda: X[_all(-5, 2)],
    "index_second": lambda: X[:, _all(4, 2)],
    "index_after_mask": lambda: X.view(4, 2, 2)[X.view(4, 2, 2)[..., 0] > 1, _all(2, 7)],
    "set": lambda: X.clone().__setitem__((_all(4, 1),), 1.0),
    "index_put": lambda: X.index_put((_all(4, 1),), torch.tensor(1.0)),
    "index_select": lambda: X.index_select(1, _all(4, 1)),
    "index_add": lambda: X.index_add(0, _all(4, 1), X[:1]),
    "index_fill": lambda: X.index_fill(0, _all(4, 1), 1.0),
    "gather": lambda: X.gather(0, _all(4, 1, 4)),
    "scatter": lambda: X.scatter(0, _all(4, 1, 4), 1.0),
    "scatter_add": lambda: X.scatter_add(0, _all(-1, 1, 4), X),
    "scatter_reduce": lambda: X.scatter_reduce(0, _all(4, 1, 4), X, "sum"),
    "take": lambda: X.take(_all(16, 1)),
    "embedding": lambda: F.embedding(_all(4, 1), X),
    "embedding_with_largest_norm": lambda: F.embedding(_all(4, 1), X.clone(), max_norm=1.0),
    "embedding_bag": lambda: F.embedding_bag(_all(4, 1), X, torch.tensor([0])),
    "cross_entropy": lambda: F.cross_entropy(X, _all(4, 4)),
    "cross_entropy_2d": lambda: F.cross_entropy(torch.randn(2, 3, 4, 4), _all(3, 2, 4, 4)),
}
INSIDE: dict[str, Callable[[], Any]] = {
    "index": lambda: X[_all(-4, 2)],
    "none": lambda: X[torch.tensor([], dtype=torch.long)],
    "mask": lambda: X[X > 3],
    "mask_second": lambda: X[:, X[0] > 1],
    "mask_and_index": lambda: X.view(4, 2, 2)[X.view(4, 2, 2)[..., 0] > 1, _all(1, 7)],
    "new_dimension": lambda: X[..., None, torch.tensor(1)],
    "gather": lambda: X.gather(1, _all(3, 4, 1)),
    "ignored": lambda: F.cross_entropy(X, _all(-100, 4)),
    "probabilities": lambda: F.cross_entropy(X, X.softmax(1)),
    "bags": lambda: F.embedding_bag(_all(3, 2), X, torch.tensor([0, 1])),
    "largest_norm": lambda: F.embedding(_all(3, 2), X.clone(), max_norm=1.0),
    "padding_backward": lambda: nn.Embedding(4, 2, padding_idx=0)(_all(0, 3)).sum().backward(),
    "backward": lambda: nn.Parameter(X.clone())[_all(3, 2)].sum().backward(),
}


@pytest.mark.parametrize("inference", [False, True], ids=["training", "inference"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_outside(name: str, inference: bool) -> None:
    # By a message of its own, so that it is not the kernel's.
    with (
        torch.inference_mode(inference),
        CheckedIndices(),
        pytest.raises(IndexError, match=r"index -?\d+ is out of bounds for \d+ rows"),
    ):
        OUTSIDE[name]()


@pytest.mark.parametrize("name", INSIDE)
def test_inside(name: str) -> None:
    expected = INSIDE[name]()
    with CheckedIndices():
        found = INSIDE[name]()
    assert expected is None or torch.equal(found.nan_to_num(), expected.nan_to_num())
