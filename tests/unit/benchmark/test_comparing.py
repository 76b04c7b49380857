"""Two runs compared: what changed beyond noise, what began to fail, and what can't be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from manycard.benchmark.comparing import compare, read_results
from manycard.errors import SettingError
from tests.unit.report.documents import document, row


def verdicts(now: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[str]:
    found = compare(document(now, 2), document(before, 2))
    return [each["verdict"] for each in found["rows"]]


@pytest.mark.parametrize(
    ("now", "before", "noise", "verdict"),
    [
        (900.0, 1000.0, 0.01, "slower"),
        (1100.0, 1000.0, 0.01, "faster"),
        (900.0, 1000.0, 0.10, "same"),  # within what each row's own rounds cover
        (990.0, 1000.0, 0.0, "same"),  # under the least change that counts
        (1000.0, None, 0.01, "works"),
        (None, 1000.0, 0.01, "fails"),
        (None, None, 0.01, "same"),
    ],
)
def test_a_change_counts_beyond_noise(now: float | None, before: float | None, noise: float, verdict: str) -> None:
    assert verdicts([row("dp", 2, now, noise=noise)], [row("dp", 2, before, noise=noise)]) == [verdict]


def test_rows_are_told_apart_by_all_that_they_ran_with() -> None:
    now = [row("dp", 2, 900.0, settings={"graphs": "on"}), row("dp", 2, 100.0, settings={"graphs": "off"})]
    before = [row("dp", 2, 100.0, settings={"graphs": "off"}), row("ddp", 2, 50.0)]
    found = compare(document(now, 2), document(before, 2), "earlier")
    assert [(each["row"], each["verdict"]) for each in found["rows"]] == [
        ("resnet50 dp on 2, graphs=on", "new"),
        ("resnet50 dp on 2, graphs=off", "same"),
        ("resnet50 ddp on 2", "gone"),
    ]
    assert found["worse"] == 0
    assert verdicts([row("dp", 2, 1.0, precision="fp32")], [row("dp", 2, 9.0)]) == ["new", "gone"]


def test_memory_is_that_of_the_fullest_card() -> None:
    (found,) = compare(
        document([row("dp", 2, 1.0, peak_memory_mib=[300.0, 100.0])], 2),
        document([row("dp", 2, 1.0, peak_memory_mib=[100.0, 200.0])], 2),
    )["rows"]
    assert found["memory_change"] == pytest.approx(0.5)


def test_another_machine_is_said() -> None:
    now, before = document([row("dp", 2, 1.0)], 1), document([row("dp", 2, 1.0)], 1)
    before["machine"] = {**before["machine"], "torch": "2.10.0", "cards": [{"name": "cuda:0", "model": "Tesla T4"}]}
    notes = compare(now, before)["notes"]
    assert notes == ["Other cards: Tesla T4 before, NVIDIA H200 now.", "torch: 2.10.0 before, 2.11.0 now."]


def test_slower_and_failing_rows_are_worse() -> None:
    now = [row("single", 1, 100.0), row("dp", 2, None, error="out of memory: no"), row("ddp", 2, 900.0)]
    before = [row("single", 1, 200.0), row("dp", 2, 500.0), row("ddp", 2, 500.0)]
    assert compare(document(now, 2), document(before, 2))["worse"] == 2


@pytest.mark.parametrize("text", [None, "", "[1]", "{}", "no json"])
def test_what_is_no_result_is_refused(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "bench.json").write_text(text)
    with pytest.raises(SettingError, match="--against"):
        read_results(tmp_path)


def test_a_folder_or_its_file_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(json.dumps(document([], 1)))
    assert read_results(tmp_path) == read_results(tmp_path / "bench.json")


def test_a_comparison_of_nothing_says_so() -> None:
    found = compare(document([row("dp", 2, 900.0)], 2), document([row("ddp", 2, 900.0)], 2))
    assert found["compared"] == 0
    assert any("nothing was compared" in note for note in found["notes"])
    found = compare(document([row("dp", 2, 900.0)], 2), document([row("dp", 2, 900.0)], 2))
    assert found["compared"] == 1
    assert not any("nothing was compared" in note for note in found["notes"])
