"""After the random state is put back, the three generators go on as they would have."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manycard.checkpoint import global_rng_state, load_global_rng_state, read_checkpoint, write_checkpoint
from manycard.errors import CheckpointError


def _draws() -> list[Any]:
    return [
        [random.random(), random.gauss(0, 1)],
        [*np.random.rand(2), np.random.randn(), np.random.randint(1000)],
        torch.randn(5).tolist(),
    ]


@pytest.mark.parametrize("gauss_left", [False, True])
def test_draws_go_on_after_a_checkpoint(tmp_path: Path, gauss_left: bool) -> None:
    if gauss_left:
        # Each gives normal draws in pairs and keeps the second.
        random.gauss(0, 1), np.random.randn(), torch.randn(1)
    write_checkpoint(tmp_path / "a.pt", {"rng": global_rng_state()})
    expected = _draws()
    assert _draws() != expected
    load_global_rng_state(read_checkpoint(tmp_path / "a.pt")["rng"])
    assert _draws() == expected


def test_something_else_is_refused_and_changes_nothing() -> None:
    state = global_rng_state()
    expected = _draws()
    load_global_rng_state(state)
    for wrong in ({}, {"python": 1}, {**state, "torch": None}):
        with pytest.raises(CheckpointError, match="not a random state"):
            load_global_rng_state(wrong)
    assert _draws() == expected


def test_another_generator_of_numpy_is_refused() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(0))
    try:
        with pytest.raises(CheckpointError, match="PCG64"):
            global_rng_state()
    finally:
        np.random.set_bit_generator(before)
