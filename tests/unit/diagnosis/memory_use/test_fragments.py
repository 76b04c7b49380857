"""When memory counts as fragmented, and which remedy is named, from figures of runs."""

from __future__ import annotations

import pytest

from manycard.diagnosis.memory_use import Reserve, Tried, judge_fragments
from manycard.diagnosis.profile import CardTime, Profile, Setup
from manycard.parallel.profiling import with_fragments

GIB = 2**30
FRAGMENTED = Reserve("cuda:0", 80 * GIB, 44 * GIB, 140 * GIB)


@pytest.mark.parametrize(
    "reserve",
    [
        Reserve("cuda:0", 60 * GIB, 58 * GIB, 140 * GIB),
        Reserve("cuda:0", 70 * GIB, 46 * GIB, 140 * GIB),  # much, on a card with room for it
        Reserve("cuda:0", 80 * GIB, 44 * GIB, 140 * GIB, graphs=30 * GIB),  # the pools of CUDA graphs
        Reserve("cuda:0", 139 * GIB, 135 * GIB, 140 * GIB),  # full, and of use
    ],
)
def test_memory_that_is_of_use_is_not_fragmented(reserve: Reserve) -> None:
    assert judge_fragments([reserve]) == []


@pytest.mark.parametrize(
    "reserve", [FRAGMENTED, Reserve("cuda:0", 70 * GIB, 62 * GIB, 80 * GIB, outside=4 * GIB)], ids=["much", "full"]
)
def test_fragments_are_found_where_nothing_could_be_tried_and_that_is_said(reserve: Reserve) -> None:
    (found,) = judge_fragments([Reserve("cuda:1", GIB, GIB, 140 * GIB), reserve], why_not="others use cuda:0")
    assert found.cause.startswith("memory of cuda:0 is fragmented")
    assert "no remedy was tried: others use cuda:0" in found.evidence
    assert found.fix.startswith("try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; give batches of one shape")


@pytest.mark.parametrize(
    ("expandable", "empty", "named"),
    [
        (45, 46, "start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; it was tried here"),
        (78, 46, "call torch.cuda.empty_cache() once, after start-up and after each evaluation"),
        (45, 79, "start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; it was tried here"),
        (58, 45, "call torch.cuda.empty_cache() once"),
        (79, 75, "give batches of one shape, or of few"),
        (None, 46, "call torch.cuda.empty_cache() once"),
    ],
)
def test_the_remedy_that_has_helped_is_the_fix(expandable: int | None, empty: int, named: str) -> None:
    tried = [
        Tried("expandable", None if expandable is None else expandable * GIB, failure="CUDA error"),
        Tried("empty", empty * GIB),
    ]
    (found,) = judge_fragments([FRAGMENTED], tried)
    assert found.fix.startswith(named)
    assert "80.0 GiB of 140.0 GiB reserved, of which 44.0 GiB at most were in use at once" in found.evidence
    assert f"emptying the cache once: {empty}.0 GiB" in found.evidence
    assert ("expandable segments failed (CUDA error)" in found.evidence) == (expandable is None)


def test_both_remedies_failed() -> None:
    (found,) = judge_fragments([FRAGMENTED], [Tried("expandable", failure="a"), Tried("empty", failure="b")])
    assert found.fix.startswith("try PYTORCH_CUDA_ALLOC_CONF")
    assert "emptying the cache once failed (b)" in found.evidence


def test_a_remedy_that_makes_steps_slower_says_so() -> None:
    profile = Profile((CardTime("cuda:0", 20.0),), 4, Setup(), reserves=(FRAGMENTED.as_dict(),))
    (found,) = with_fragments(profile, [Tried("expandable", 45 * GIB, 30.0)]).growth
    assert found.fix.endswith("it was tried here (steps took 30 ms instead of 20)")
    (found,) = with_fragments(profile, [Tried("expandable", 45 * GIB, 20.5)]).growth
    assert found.fix.endswith("it was tried here")
    assert Profile.of(profile.as_dict()).reserves == profile.reserves
