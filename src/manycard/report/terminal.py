"""Results of a benchmark as tables for the terminal. Decides nothing: every figure comes from the rows.

On a narrow terminal the table is cut in two, speed and the rest. A row with an error shows it under the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from manycard.report import figures
from manycard.report.causes import print_causes
from manycard.report.columns import Column, cells, label_columns, remarks, rest_columns, row_name, speed_columns
from manycard.report.timeline import print_timeline

__all__ = ["COMPARISON_HEADINGS", "comparison_cells", "print_benchmark", "print_comparison", "section_title", "widen"]

Row = Mapping[str, Any]
_WIDTH_OF_A_FILE = 140
"""Columns for tables that go to a file or a pipe, where no terminal says how wide it is."""
_VERDICT_STYLES = {
    "slower": "red",
    "fails": "red",
    "faster": "green",
    "works": "green",
    "new": "cyan",
    "gone": "yellow",
}


def widen(console: Console) -> None:
    """Give tables that go to a file or a pipe enough room."""
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH_OF_A_FILE)


def print_benchmark(document: Mapping[str, Any], console: Console) -> None:
    """Print each workload's tables and what holds its rows back, then what has to be known to read them."""
    widen(console)
    for workload, rows in figures.workloads_of(document["rows"]).items():
        console.print(Text(section_title(workload, rows), style="bold"))
        for table in _tables(rows, console):
            console.print(table)
        for row in rows:
            if row.get("timeline") is not None:
                print_timeline(row["timeline"], console, row_name(row))
        for words, is_error in remarks(rows):
            console.print(Text(f"  {words}", style="red" if is_error else "yellow"))
        print_causes(rows, console)
        console.print()
    for note in document["notes"]:
        console.print(Text(note, style="yellow"))
    if document["interrupted"]:
        console.print(Text("Interrupted: these are the rows that were done.", style="bold yellow"))
    if document.get("comparison"):
        print_comparison(document["comparison"], console)


def print_comparison(comparison: Mapping[str, Any], console: Console) -> None:
    """Print what has changed since another run."""
    widen(console)
    console.print()
    console.print(Text(f"Against {comparison['against']}", style="bold"))
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("row")
    for heading in COMPARISON_HEADINGS[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in comparison["rows"]:
        table.add_row(*comparison_cells(row), style=_VERDICT_STYLES.get(row["verdict"]))
    console.print(table)
    for note in comparison["notes"]:
        console.print(Text(note, style="yellow"))


COMPARISON_HEADINGS = ("row", "before", "now", "change", "noise", "memory", "")


def comparison_cells(row: Row) -> list[str]:
    """One compared row as text, under `COMPARISON_HEADINGS`."""
    return [
        row["row"],
        figures.speed(row["before"]),
        figures.speed(row["now"]),
        figures.change(row["change"]),
        figures.NOTHING if row["noise"] is None else f"± {100 * row['noise']:.1f} %",
        figures.change(row["memory_change"]),
        row["verdict"],
    ]


def _tables(rows: Sequence[Row], console: Console) -> list[Table]:
    """One table, or two with the same rows where one would be too wide for `console`."""
    labels, speed, rest = label_columns(rows), speed_columns(rows), rest_columns(rows)
    whole = _table(rows, [*labels, *speed, *rest])
    if Measurement.get(console, console.options.update(width=1000), whole).maximum <= console.width:
        return [whole]
    return [_table(rows, [*labels, *speed]), _table(rows, [*labels, *rest])]


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, collapse_padding=True)
    for column in columns:
        table.add_column(column.heading, justify="left" if column.heading == "strategy" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row, columns), style="red" if row["error"] is not None else None)
    return table


def section_title(workload: str, rows: Sequence[Row]) -> str:
    """What all rows of a workload have in common, in one line."""
    row = rows[0]
    batches = {each["batch"] for each in rows if each["batch"] is not None}
    if row["scaling"] == "strong":
        sizes = f"global batch {max(batches):,}" if len(batches) == 1 else "its own batch"
    else:
        sizes = f"{row['per_card_batch']:,} a card"
    cards = "simulated cards" if row["simulated"] else "GPUs"
    precisions = sorted({each["precision"] for each in rows})
    return f"{workload}: {sizes} ({row['scaling']} scaling), precision {', '.join(precisions)}, {cards}"
