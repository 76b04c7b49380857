"""Remedies against fragments are tried in runs of the same steps, and what goes wrong there is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from manycard.cli.profile_remedies import allocator_setting, is_trial, try_remedies


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


def test_a_trial_that_fails_says_why(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere.py")
    tried = try_remedies(["--cards", "cpu:1", missing], "cuda:0", 60)
    assert [each.remedy for each in tried] == ["expandable", "empty"]
    for each in tried:
        assert each.reserved is None
        assert "nowhere.py" in each.failure
