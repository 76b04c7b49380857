"""What holds the rows of a benchmark back, as far as their own processes can't say it.

Behaviour:
    * `expect` gives a row the speed that one card makes it expect; in its process that decides whether steps are
      profiled (`profiled`).
    * `add_pipelines` reads a pipeline's own timeline in place of a profile.
    * `add_links` has the links between the cards measured, once, and only where some row loses time between cards. What
      is wrong with them joins the findings of such rows, with the gain of that lost time.
    * Rows of an efficiency of `EFFICIENT` or more are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from manycard.benchmark.measurement import EFFICIENT, Measurement, single_of
from manycard.benchmark.profiled import Expected
from manycard.benchmark.row import RowSpec
from manycard.diagnosis import Finding, read_facts
from manycard.diagnosis.between_cards import find_between_cards
from manycard.diagnosis.measuring import measure
from manycard.errors import ManycardError

__all__ = ["add_links", "add_pipelines", "expect", "faults_of_links"]

_LEAST_GAIN = 1.05
_BETWEEN = frozenset({"reduce", "imbalance"})
"""Parts of a step that slow links make longer."""


def expect(spec: RowSpec, rows: Sequence[Measurement], rounds: Sequence[Measurement]) -> Expected | None:
    """What a row is told before its last round; None where nothing is expected of it.

    Args:
        spec: the row.
        rows: what is known of all rows.
        rounds: the row's rounds so far.
    """
    single = None if spec.strategy == "single" else single_of(spec.measurement(), rows)
    if single is None or single.samples_per_s is None:
        return None
    earlier = tuple(row.samples_per_s for row in rounds if row.samples_per_s is not None)
    return Expected(single.samples_per_s, len(spec.card_names), earlier)


def add_pipelines(rows: Sequence[Measurement]) -> list[Measurement]:
    """`rows` with what their timelines say of those pipelines that are less efficient than they could be."""
    return [
        replace(row, findings=tuple(_of_timeline(row.timeline)))
        if row.timeline is not None and row.efficiency is not None and row.efficiency < EFFICIENT
        else row
        for row in rows
    ]


def _of_timeline(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Cards that wait for micro-batches, and stages of unequal time; the biggest gain first."""
    uneven = 1 / found["balance"]
    waiting = (1 - found["bubble"]) / found["balance"]  # the busiest card's share of the time
    ms = ", ".join(f"{1e3 * seconds:.3g}" for seconds in found["busy_seconds"])
    parts = found["micro_batches"]
    every = [
        (
            Finding(
                "the stages of the pipeline take unequal time, and the cards wait for the slowest",
                f"the cards compute {ms} ms a step",
                "cut the model elsewhere (stages=[...]), so that each stage takes as long; without stages= it is cut "
                "by what the parts take",
                "warning",
            ),
            uneven,
        ),
        (
            Finding(
                "the cards of the pipeline wait for their first and for others' last micro-batches",
                f"{100 * (1 - waiting):.0f} % of the busiest card's time, with {parts} micro-batches",
                f"cut batches into more parts (micro_batches={2 * parts}), or give a larger batch",
                "warning",
            ),
            1 / max(waiting, 0.01),
        ),
    ]
    large = [{**asdict(finding), "gain": round(gain, 3)} for finding, gain in every if gain >= _LEAST_GAIN]
    return sorted(large, key=lambda each: -each["gain"])


def faults_of_links(cards: str) -> list[Finding]:
    """What is wrong between the cards, measured now: ten seconds to a minute.

    Args:
        cards: as ``--cards`` takes them.
    """
    facts = read_facts(cards)
    return find_between_cards(replace(facts, measured=measure(facts, stages=("copies", "nccl"))))


def add_links(
    rows: Sequence[dict[str, Any]], look: Callable[[], Sequence[Finding]], say: Callable[[str], None]
) -> None:
    """Add to rows that lose time between cards what is wrong there.

    Args:
        rows: of a document; they are changed.
        look: finds what is wrong; called at most once.
        say: told before that what it is for.
    """
    losing = [
        (row, max(gains))
        for row in rows
        if not row["simulated"] and (gains := [each["gain"] for each in row["findings"] or () if _is_between(each)])
    ]
    if not losing:
        return
    say("some rows lose time between cards: measuring the links")
    try:
        found = look()
    except ManycardError as error:  # the rows are measured, whatever becomes of the links
        say(f"the links could not be measured: {error}")
        return
    for row, gain in losing:
        more = [{**asdict(finding), "gain": gain, "part": "links"} for finding in found]
        row["findings"] = sorted([*row["findings"], *more], key=lambda each: -each["gain"])


def _is_between(finding: Mapping[str, Any]) -> bool:
    return finding.get("part") in _BETWEEN
