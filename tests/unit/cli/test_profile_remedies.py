"""Remedies against fragments are tried in runs of the same steps, and what goes wrong there is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from manycard.cli import profile_remedies
from manycard.cli.profile import _with_remedies
from manycard.cli.profile_remedies import allocator_setting, is_trial, try_remedies
from manycard.diagnosis.memory_use import Reserve, Tried
from manycard.diagnosis.profile import CardTime, Profile, Setup


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"},
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True"},
        ),
    ],
)
def test_what_the_allocator_is_told_already_stays(environment: dict[str, str], expected: dict[str, str]) -> None:
    assert allocator_setting(environment) == expected


def test_a_trial_is_no_place_for_trials() -> None:
    assert is_trial({"MANYCARD_TRIED_REMEDY": "empty"})
    assert not is_trial({})


GIB = 2**30
FRAGMENTED = Reserve("cuda:0", 80 * GIB, 44 * GIB, 140 * GIB)


def profile(reserve: Reserve) -> Profile:
    return Profile((CardTime("cuda:0", 10.0),), 4, Setup(), reserves=(reserve.as_dict(),))


def test_a_fragmented_profile_tries_remedies_with_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def tries(*words: object) -> list[Tried]:
        asked.append(words)
        return [Tried("expandable", 45 * GIB), Tried("empty", 79 * GIB)]

    monkeypatch.setattr(profile_remedies, "why_not_tried", lambda reserves: "")
    monkeypatch.setattr(profile_remedies, "try_remedies", tries)
    (found,) = _with_remedies(profile(FRAGMENTED), ["train.py", "--lr", "1"], 10.0).growth
    assert asked == [(["train.py", "--lr", "1"], "cuda:0", 90.0)]
    assert found.fix == "start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; it was tried here"
    whole = profile(Reserve("cuda:0", 45 * GIB, 44 * GIB, 140 * GIB))
    assert _with_remedies(whole, ["train.py"], 10.0) == whole
    monkeypatch.setenv(profile_remedies.VARIABLE, "empty")
    assert _with_remedies(profile(FRAGMENTED), ["train.py"], 10.0).growth == ()
    assert len(asked) == 1


def test_what_keeps_remedies_from_being_tried_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_remedies, "why_not_tried", lambda reserves: "cuda:0 has less free memory")
    (found,) = _with_remedies(profile(FRAGMENTED), ["train.py"], 10.0).growth
    assert "no remedy was tried: cuda:0 has less free memory" in found.evidence


def test_a_trial_that_fails_says_why(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere.py")
    tried = try_remedies(["--cards", "cpu:1", missing], "cuda:0", 60)
    assert [each.remedy for each in tried] == ["expandable", "empty"]
    for each in tried:
        assert each.reserved is None
        assert "nowhere.py" in each.failure
