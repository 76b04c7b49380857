"""How messages show a value that can't work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import manycard as mc
from manycard.errors import SettingError


def my_split(batch: Any, cards: Any) -> Any:
    return batch


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("gpipe", "stages='gpipe'"),
        (["blocks.1", "norm"], "stages=['blocks.1', 'norm']"),
        (my_split, "stages=my_split"),
        (torch.optim.SGD, "stages=SGD"),
        (object(), "stages=<object>"),
        (torch.ones(3, 3), "stages=<Tensor>"),
        (float("nan"), "stages=nan"),
    ],
)
def test_values_are_shown_as_they_were_written_or_by_name(value: Any, shown: str) -> None:
    assert str(SettingError("stages", value, "no")) == f"{shown}: no."


def test_a_long_value_is_shown_by_its_beginning() -> None:
    text = str(SettingError("weights", list(range(1000)), "there are too many"))
    assert text.startswith("weights=[0, 1, 2,")
    assert text.endswith(" ...: there are too many.")
    assert len(text) < 200


def test_a_function_in_the_wrong_strategy_is_named() -> None:
    with pytest.raises(SettingError, match="split=my_split: strategy 'dp' decides by itself"):
        mc.Parallel("dp", cards="cpu:2", split=my_split)
