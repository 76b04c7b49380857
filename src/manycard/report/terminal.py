"""Results of a benchmark as tables for the terminal. Decides nothing: every figure comes from the rows.

A column in which no row has a figure is left out, except speed. A row with an error shows it under the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from manycard.report import figures

__all__ = ["benchmark_tables", "print_benchmark"]

Row = Mapping[str, Any]
_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("speed-up", "speedup", figures.times),
    ("efficiency", "efficiency", figures.percent),
    ("memory a card\nMiB, peak", "peak_memory_mib", figures.memory),
    ("balance", "balance", figures.ratio),
    ("final\nloss", "final_loss", figures.loss),
    ("test\naccuracy", "accuracy", lambda value: figures.percent(value, 1)),
    ("losses differ\nfrom single by", "largest_loss_difference", figures.difference),
)
_WIDTH_OF_A_FILE = 120
"""Columns for tables that go to a file or a pipe, where no terminal says how wide it is."""


def print_benchmark(document: Mapping[str, Any], console: Console) -> None:
    """Print one table a workload, then what has to be known to read them."""
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH_OF_A_FILE)
    console.print(benchmark_tables(document))


def benchmark_tables(document: Mapping[str, Any]) -> RenderableType:
    """One table a workload, errors under it, notes at the end."""
    parts: list[RenderableType] = []
    for workload, rows in figures.workloads_of(document["rows"]).items():
        parts.append(_table(workload, rows))
        parts += [
            Padding(Text(f"{row['strategy']} on {row['cards']}: {row['error']}", style="red"), (0, 0, 0, 2))
            for row in rows
            if row["error"] is not None
        ]
        parts.append(Text())
    parts += [Text(note, style="yellow") for note in document["notes"]]
    if document["interrupted"]:
        parts.append(Text("Interrupted: these are the rows that were done.", style="bold yellow"))
    return Group(*parts)


def _table(workload: str, rows: Sequence[Row]) -> Table:
    table = Table(title=_title(workload, rows), title_justify="left", header_style="bold")
    table.add_column("strategy", no_wrap=True)
    table.add_column("cards", justify="right")
    several_batches = len({row["batch"] for row in rows}) > 1
    if several_batches:
        table.add_column("global\nbatch", justify="right")
    table.add_column(f"{rows[0]['unit']}/s", justify="right", no_wrap=True)
    table.add_column("ms a\nstep", justify="right", no_wrap=True)
    shown = [column for column in _COLUMNS if any(_known(row[column[1]]) for row in rows)]
    for heading, _, _ in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = [str(row["strategy"]), str(row["cards"])]
        if several_batches:
            cells.append(f"{row['batch']:,}")
        cells += [figures.speed(row["samples_per_s"]), figures.speed(row["step_ms"])]
        cells += [write(row[key]) for _, key, write in shown]
        table.add_row(*cells, style="red" if row["error"] is not None else None)
    return table


def _title(workload: str, rows: Sequence[Row]) -> str:
    row = rows[0]
    sizes = f"global batch {row['batch']:,}" if row["scaling"] == "strong" else f"{row['per_card_batch']:,} a card"
    cards = "simulated cards" if row["simulated"] else "GPUs"
    return f"{workload}: {sizes} ({row['scaling']} scaling), precision {row['precision']}, {cards}"


def _known(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(item is not None for item in value)
    return value is not None
