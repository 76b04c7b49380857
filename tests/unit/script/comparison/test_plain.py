"""Plain values: what is looked at, and what counts as alike."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from manycard.script.comparison.plain import alike, beside_tensors, looks, whole_values


class Box:
    """An object with attributes."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        ("a", "b"),
        (1, 1.0),
        (0.5, 0.6),
        ([1, 2], [1, 2, 3]),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        (deque([1]), deque([2])),
        ({1, 2}, {1, 3}),
        (np.arange(3), np.arange(4)),
        (np.array([0.1]), np.array([0.2])),
        (np.float64(0.1), np.float64(0.2)),
        (Box(total=1.0, inside=Box(count=2)), Box(total=1.0, inside=Box(count=3))),
        ({"meters": [Box(sum=1.5)]}, {"meters": [Box(sum=2.5)]}),
        (torch.ones(2), torch.zeros(2)),
    ],
)
def test_differences_are_seen(one: Any, other: Any) -> None:
    assert alike(one, one)
    assert not alike(one, other)
    if not isinstance(one, torch.Tensor):
        assert not alike(looks(one), looks(other), 0.0)


def test_rounding_is_no_difference_unless_asked() -> None:
    assert alike(Box(mean=1 / 3), Box(mean=1 / 3 + 1e-9))
    assert not alike(1 / 3, 1 / 3 + 1e-9, 0.0)
    assert alike(float("nan"), float("nan"))


def test_what_was_looked_at_is_a_copy() -> None:
    box = Box(values=[1, 2], more=np.zeros(2))
    before = looks(box)
    box.values.append(3)
    box.more[0] = 1
    assert not alike(before, looks(box), 0.0)


def test_a_value_that_holds_itself_is_looked_at_once() -> None:
    box = Box(count=1)
    box.itself = box
    assert alike(looks(box), looks(box))


def test_the_rest_of_an_output() -> None:
    output = {"scores": torch.ones(2), "names": ["a", "b"], "share": 0.5, "nothing": None}
    assert beside_tensors(output) == {"['names'][0]": "a", "['names'][1]": "b", "['share']": 0.5, "['nothing']": None}
    assert whole_values(output) == {"['names'][0]": "a", "['names'][1]": "b"}
    assert beside_tensors(3) == {"itself": 3}
