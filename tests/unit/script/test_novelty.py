"""Calls that hold what no call before held."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from manycard.script.novelty import Novelty, _values


def test_a_class_that_comes_late() -> None:
    novelty, inputs = Novelty(), torch.randn(6, 3)
    assert not novelty.finds((inputs, torch.tensor([0, 1, 0, 1])))
    assert not novelty.finds((inputs, torch.tensor([1, 1])))
    assert novelty.finds((inputs, torch.tensor([1, 2])))
    assert not novelty.finds((inputs, torch.tensor([2, 0])))
    assert novelty.finds((inputs, torch.tensor([-100, 0])))


def test_a_mask_that_is_no_longer_empty() -> None:
    novelty = Novelty()
    assert not novelty.finds({"mask": torch.zeros(4)})
    assert not novelty.finds({"mask": torch.zeros(6)})
    assert novelty.finds({"mask": torch.tensor([0.0, 1.0])})
    assert not novelty.finds({"mask": torch.tensor([0.0, 2.0])})


def test_words_are_no_classes() -> None:
    novelty = Novelty()
    assert not novelty.finds(torch.arange(200))
    assert not novelty.finds(torch.arange(300, 900))


def test_words_and_pixels_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at a batch of bytes takes eight times its memory."""
    seen: list[Tensor] = []
    monkeypatch.setattr("manycard.script.novelty._values", lambda tensor: [seen.append(tensor), _values(tensor)][1])
    novelty, pixels, labels = Novelty(), torch.arange(200, dtype=torch.uint8), torch.tensor([0, 1])
    padded = torch.tensor([0.0, 0.5])
    for _ in range(3):
        assert not novelty.finds((pixels, padded, labels))
    assert [tensor is labels for tensor in seen] == [False, False, True, True, True]


def test_what_is_always_new_is_not_told_for_ever() -> None:
    novelty = Novelty()
    novelty.finds(torch.tensor([0]))
    assert sum(novelty.finds(torch.tensor([number])) for number in range(1, 100)) == 12


def test_another_number_of_tensors_or_dtype_is_no_error() -> None:
    novelty = Novelty()
    novelty.finds((torch.zeros(3), torch.tensor([1])))
    assert not novelty.finds((torch.zeros(3),))
    assert not novelty.finds((torch.tensor([5]), torch.tensor([1.0]), torch.zeros(0)))
