"""What is unequal is named with its figures; what is even, or not known, is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manycard.diagnosis.live import JobSample, ProcessOnCard, Sample, imbalance
from tests.unit.diagnosis.live.made_samples import CARD, GIB, ranks, samples


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"use": 45}, "card 1 is used 45 % of the time and card 0 97 %"),
        ({"power": 240.0}, "card 1 draws 240 W and card 0 610 W"),
        ({"memory_used": 90 * GIB}, "card 1 holds 90.0 GiB and card 0 40.0 GiB"),
        ({"reasons": ("heat (software)", "power cap")}, "card 1 is held back (heat (software))"),
    ],
)
def test_each_inequality_is_named(second: dict[str, object], words: str):
    found = imbalance(samples(**second))
    assert len(found) == 1
    assert words in found[0]


@pytest.mark.parametrize(
    "second",
    [
        {},
        {"use": 85},
        {"power": 560.0},
        {"memory_used": 50 * GIB},
        {"reasons": ("power cap",)},
        {"use": None, "power": None, "memory_used": None, "temperature": None},
        {"use": 0, "power": 70.0, "memory_used": 0},
    ],
)
def test_small_differences_gaps_and_free_cards_are_none(second: dict[str, object]):
    assert imbalance(samples(**second)) == []


def test_a_card_of_the_run_that_does_nothing():
    job = JobSample(4242, "python train.py", cards=("card 0", "card 1"))
    assert imbalance(samples(jobs=(job,), use=0, memory_used=GIB)) == ["card 1 has nothing to do while others work"]


def test_ranks_that_touched_the_first_card():
    first, second = samples(2)[0].cards
    own = ProcessOnCard(7, 20 * GIB)
    cards = (
        replace(first, processes=(*(first.processes or ()), replace(own, memory=GIB // 2))),
        replace(second, processes=(own,)),
    )
    found = imbalance([Sample(float(at), cards) for at in range(2)])
    assert len(found) == 1
    assert found[0].startswith("card 0 also holds 512 MiB of processes at work on other cards (pid 7)")


def test_one_look_is_too_little():
    assert imbalance(samples(1, use=10)) == []
    assert imbalance([]) == []


def test_only_the_last_looks_count():
    assert imbalance([*samples(30, use=20), *samples(30)]) == []


def test_no_work_at_all():
    idle = [Sample(float(at), (replace(CARD, use=0), replace(CARD, name="card 1", use=0))) for at in range(3)]
    assert imbalance(idle) == []


def test_ranks_on_the_cpu():
    uneven = [Sample(float(at), jobs=(ranks(95.0, 40.0),)) for at in range(3)]
    assert imbalance(uneven) == ["rank 1 of 99 takes 40 % of a core and rank 0 95 %"]
    assert imbalance([Sample(float(at), jobs=(ranks(95.0, 90.0),)) for at in range(3)]) == []
