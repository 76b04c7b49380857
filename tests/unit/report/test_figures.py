"""How figures are written."""

from __future__ import annotations

import pytest

from manycard.report import figures


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (figures.speed, 12547.4, "12,547"),
        (figures.speed, 18.44, "18.4"),
        (figures.speed, 0.523, "0.52"),
        (figures.times, 1.934, "1.93x"),
        (figures.percent, 0.967, "97 %"),
        (figures.ratio, 1.0, "1.00"),
        (figures.loss, 0.031243, "0.03124"),
        (figures.difference, 0.0, "0"),
        (figures.difference, 3.14e-7, "3.1e-07"),
        (figures.difference, 0.123, "12.3 %"),
        (figures.memory, [100.2, 100.4], "100"),
        (figures.memory, [2000.0, 1000.0], "2,000 / 1,000"),
        (figures.memory, [2000.0, 1000.0, 1500.0], "1,000 to 2,000"),
        (figures.memory, [None, None], figures.NOTHING),
        (figures.shares, [0.754, 0.246], "75 / 25 %"),
        (figures.shares, None, figures.NOTHING),
        (figures.speed, None, figures.NOTHING),
        (figures.difference, None, figures.NOTHING),
        (figures.loss, None, figures.NOTHING),
    ],
)
def test_figures_are_written_for_people(write: object, value: object, text: str) -> None:
    assert write(value) == text  # type: ignore[operator]


def test_rows_are_grouped_by_workload_in_their_order() -> None:
    rows = [{"workload": "b", "n": 1}, {"workload": "a", "n": 2}, {"workload": "b", "n": 3}]
    assert {name: [row["n"] for row in group] for name, group in figures.workloads_of(rows).items()} == {
        "b": [1, 3],
        "a": [2],
    }
