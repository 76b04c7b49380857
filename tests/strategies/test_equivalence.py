"""Every strategy trains as plain PyTorch does on one card, on 1 to 4 cards.

The same 20 global batches; every loss, final parameter, buffer and optimizer state is compared. One tolerance for
all cases: 1e-9 in fp64; in fp32 1e-5 relative for losses.
"""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch

from .cases import CASES, Case
from .conftest import Get
from .reference import Outcome, train_in_groups, train_in_loop
from .runs import FP32_CARDS

ON = [("single", 1), *(("dp", cards) for cards in (1, 2, 3, 4)), *(("ddp", cards) for cards in (1, 2, 3, 4))]
BY_NAME = {case.name: case for case in CASES}
REFERENCES = {"step": train_in_groups, "loop": train_in_loop}
RUNS = [("step", case.name) for case in CASES] + [("loop", case.name) for case in CASES if case.in_explicit_loop]


@cache
def reference(mode: str, name: str, dtype: torch.dtype) -> Outcome:
    """One card's training, once for all strategies."""
    return REFERENCES[mode](BY_NAME[name], dtype)


@pytest.mark.parametrize(("strategy", "cards"), ON)
@pytest.mark.parametrize(("mode", "name"), RUNS)
def test_fp64_training_is_that_of_one_card(get: Get, strategy: str, cards: int, mode: str, name: str) -> None:
    expected = reference(mode, name, torch.float64)
    for actual in get(strategy, cards, f"{mode}/{name}/torch.float64"):
        torch.testing.assert_close(actual.losses, expected.losses, rtol=1e-9, atol=1e-9)
        assert actual.tensors.keys() == expected.tensors.keys()
        for key, tensor in expected.tensors.items():
            close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}")
            close(actual.tensors[key], tensor)
        assert actual.without_grad == expected.without_grad
        assert actual.learning_rates == pytest.approx(expected.learning_rates, rel=1e-12)


@pytest.mark.parametrize(("strategy", "cards"), [("single", 1), ("dp", FP32_CARDS), ("ddp", FP32_CARDS)])
@pytest.mark.parametrize("name", BY_NAME)
def test_fp32_losses_are_those_of_one_card(get: Get, strategy: str, cards: int, name: str) -> None:
    """Of `step`; the explicit loop in fp32 shows nothing that fp64 does not."""
    expected = reference("step", name, torch.float32)
    for actual in get(strategy, cards, f"step/{name}/torch.float32"):
        assert actual.losses == pytest.approx(expected.losses, rel=1e-5)


@pytest.mark.parametrize("cards", [2, 3, 4])
@pytest.mark.parametrize(("mode", "name"), RUNS)
def test_ranks_hold_equal_bits(get: Get, cards: int, mode: str, name: str) -> None:
    first, *others = get("ddp", cards, f"{mode}/{name}/torch.float64")
    for other in others:
        assert other.losses == first.losses
        assert all(torch.equal(other.tensors[key], tensor) for key, tensor in first.tensors.items())


def test_the_cases_can_tell_a_wrong_weight() -> None:
    """A group weighted by micro-batches in place of samples, as loops that divide by a constant do, is seen."""
    case: Case = BY_NAME["accumulate_sgd"]
    by_samples, by_micro_batches = train_in_groups(case, torch.float64), train_in_loop(case, torch.float64)
    assert by_samples.losses[:4] == pytest.approx(by_micro_batches.losses[:4], rel=1e-12)
    assert by_samples.losses[-1] != pytest.approx(by_micro_batches.losses[-1], rel=1e-6)
