"""What is wrong between cards is found without what is wrong elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from manycard.diagnosis import Facts
from manycard.diagnosis.between_cards import find_between_cards
from tests.unit.diagnosis.made import well
from tests.unit.diagnosis.test_planted import SLOW_SUMS, around, copied, found, loaded, sick, variables


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda: copied(0, gb_per_s=40.0), "copies from cuda:0 to cuda:1 are much slower"),
        (lambda: copied(1, wrong_bytes=512), "copies from card to card arrive wrong"),
        (lambda: found(all_reduces=SLOW_SUMS), "NCCL's all-reduce is much slower"),
        (lambda: variables(NCCL_P2P_DISABLE="1"), "direct access between cards (P2P) is switched off"),
    ],
)
def test_a_fault_between_cards_is_found(make: Callable[[], Facts], cause: str) -> None:
    (finding,) = find_between_cards(make())
    assert cause in finding.cause


@pytest.mark.parametrize(
    "make",
    [
        lambda: well(2),
        lambda: well(1, environment={"NCCL_P2P_DISABLE": "1"}),  # one card has nobody to talk to
        lambda: loaded(temperature=85),
        lambda: sick(persistence=False),
        lambda: around(open_files=256),
        lambda: variables(NCCL_DEBUG="INFO"),  # a note
    ],
)
def test_nothing_is_said_of_other_faults(make: Callable[[], Facts]) -> None:
    assert find_between_cards(make()) == []
