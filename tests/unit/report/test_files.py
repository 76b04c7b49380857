"""Markdown and CSV hold every row; settings have columns; comparisons are shown."""

from __future__ import annotations

import csv
import io

from rich.console import Console

from manycard.benchmark import compare
from manycard.report import benchmark_markdown, benchmark_page, print_benchmark, rows_as_csv
from tests.unit.report.documents import EIGHT_CARDS, SIMULATED, document, row

ROWS = [
    row("single", 1, 4700.0, settings={"precision": "bf16"}, noise=0.004, spread=[4680.0, 4720.0]),
    row("dp", 2, 9000.0, settings={"precision": "bf16", "graphs": "on"}, joules_per_sample=0.0714, steady=False),
    row("dp", 2, 8500.0, settings={"precision": "bf16", "graphs": "off"}, note="a|b"),
]


def test_csv_has_each_figure_and_a_column_for_each_setting() -> None:
    found = list(csv.DictReader(io.StringIO(rows_as_csv(ROWS))))
    assert [each["set_graphs"] for each in found] == ["", "on", "off"]
    assert found[0]["spread"] == "4680.0;4720.0"
    assert float(found[1]["samples_per_s"]) == 9000.0
    assert found[1]["card_names"] == "cuda:0;cuda:1"
    assert "losses" not in found[0]
    assert len(list(csv.reader(io.StringIO(rows_as_csv(EIGHT_CARDS["rows"]))))) == 1 + len(EIGHT_CARDS["rows"])
    assert rows_as_csv([]) == ""


def test_markdown_has_every_row_and_what_is_said_of_it() -> None:
    text = benchmark_markdown(document(ROWS, 2))
    assert "| dp | 2 | bf16 | on |" in text
    assert "0.0714" in text
    assert "- dp on 2, precision=bf16, graphs=on: its step times had not settled when it ended" in text
    assert "- dp on 2, precision=bf16, graphs=off: a|b" in text
    assert "The cards are simulated <and share one CPU>." in benchmark_markdown(SIMULATED)


def test_a_comparison_is_shown_everywhere() -> None:
    shown = document([row("dp", 2, 900.0)], 2)
    shown["comparison"] = compare(shown, document([row("dp", 2, 1000.0)], 2), "last/bench.json")
    text = io.StringIO()
    print_benchmark(shown, Console(file=text, width=140))
    for made in (text.getvalue(), benchmark_markdown(shown), benchmark_page(shown)):
        assert "last/bench.json" in made
        assert "-10.0 %" in made
        assert "slower" in made
