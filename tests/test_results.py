"""The figures of splitting by hand in the documentation are those of the results, and reach what was set out for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "splitting.md").read_text(encoding="utf-8")


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of one result."""
    document = json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = document["rows"]
    return found


HEALTHY = sorted((ROOT / "benchmarks" / "results").glob("healthy-*.json"))
UNEVEN, LENGTHS = rows("uneven-cards-cpu.json"), rows("length-buckets-cpu.json")


@pytest.mark.parametrize("row", UNEVEN, ids=lambda row: f"{row['cards']} cards")
def test_shares_found_for_a_slow_card(row: dict[str, Any]) -> None:
    assert row["slowdown_of_last"] == 3
    assert row["auto_of_ideal"] >= 0.9
    assert row["auto_over_equal"] >= 1.5
    equal, auto = (f"{row['ways'][way]['samples_per_s']:,.0f}" for way in ("equal", "auto"))
    gains = f"{row['auto_of_ideal']:.2f} | {row['auto_over_equal']:.2f}"
    found = f"{row['auto_steps_until_found']} steps, {row['auto_changes']} changes"
    assert f"| {row['cards']} | {equal} | {auto} | {gains} | {found} |" in TEXT


@pytest.mark.parametrize("row", LENGTHS, ids=lambda row: f"{row['cards']} cards")
def test_batches_cut_by_length(row: dict[str, Any]) -> None:
    busiest = row["places_on_the_busiest_card"]
    places = f"{busiest['even']:,} | {busiest['by_length']:,}"
    saved, difference = 100 * row["places_saved"], row["largest_loss_difference"]
    assert f"| {row['cards']} | {row['words']:,} | {places} | {saved:.0f} % | {difference:.0e} |" in TEXT
    assert f"{row['speedup']:.1f}" in TEXT


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.name)
def test_a_healthy_run_has_no_finding(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["findings"] == []
    assert f"-{document['cards']}x" in path.name
    assert not document["profile"][0]["simulated"]
