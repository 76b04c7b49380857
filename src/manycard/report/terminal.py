"""Results of a benchmark as tables for the terminal. Decides nothing: every figure comes from the rows.

Test accuracy and differences of losses have a column where some row has them; everything else always has. On a
narrow terminal the table is cut in two, speed and the rest. A row with an error shows it under the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from manycard.report import figures
from manycard.report.timeline import print_timeline

__all__ = ["print_benchmark"]

Row = Mapping[str, Any]
_WIDTH_OF_A_FILE = 120
"""Columns for tables that go to a file or a pipe, where no terminal says how wide it is."""


@dataclass(frozen=True)
class _Column:
    heading: str
    key: str
    write: Callable[[Any], str]
    only_where_known: bool = False
    """Whether the column is left out when no row has a figure for it."""


_SPEED = (
    _Column("speed-up", "speedup", figures.times),
    _Column("effi-\nciency", "efficiency", figures.percent),
)
_REST = (
    _Column("peak memory\na card, MiB", "peak_memory_mib", figures.memory),
    _Column("balance", "balance", figures.ratio),
    _Column("shares", "shares", figures.shares, only_where_known=True),
    _Column("final\nloss", "final_loss", figures.loss),
    _Column("test\naccuracy", "accuracy", lambda value: figures.percent(value, 1), only_where_known=True),
    _Column("losses differ\nfrom single by", "largest_loss_difference", figures.difference, only_where_known=True),
)


def print_benchmark(document: Mapping[str, Any], console: Console) -> None:
    """Print the tables of each workload, then what has to be known to read them."""
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH_OF_A_FILE)
    for workload, rows in figures.workloads_of(document["rows"]).items():
        console.print(Text(_title(workload, rows), style="bold"))
        for table in _tables(rows, console):
            console.print(table)
        for row in rows:
            if row.get("timeline") is not None:
                print_timeline(row["timeline"], console)
        for row in rows:
            if row["error"] is not None:
                console.print(Text(f"  {row['strategy']} on {row['cards']}: {row['error']}", style="red"))
        console.print()
    for note in document["notes"]:
        console.print(Text(note, style="yellow"))
    if document["interrupted"]:
        console.print(Text("Interrupted: these are the rows that were done.", style="bold yellow"))


def _tables(rows: Sequence[Row], console: Console) -> list[Table]:
    """One table, or two with the same rows where one would be too wide for `console`."""
    several_batches = len({row["batch"] for row in rows}) > 1
    batch = (_Column("global\nbatch", "batch", "{:,}".format),) if several_batches else ()
    speed = (
        *batch,
        _Column(f"{rows[0]['unit']}/s", "samples_per_s", figures.speed),
        _Column("ms a\nstep", "step_ms", figures.speed),
        *_SPEED,
    )
    whole = _table(rows, (*speed, *_REST))
    if Measurement.get(console, console.options.update(width=1000), whole).maximum <= console.width:
        return [whole]
    return [_table(rows, speed), _table(rows, _REST)]


def _table(rows: Sequence[Row], columns: Sequence[_Column]) -> Table:
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("strategy", no_wrap=True)
    table.add_column("cards", justify="right", no_wrap=True)
    shown = [
        column
        for column in columns
        if not column.only_where_known or any(row.get(column.key) is not None for row in rows)
    ]
    for column in shown:
        table.add_column(column.heading, justify="right", no_wrap=True)
    for row in rows:
        cells = [column.write(row.get(column.key)) for column in shown]
        style = "red" if row["error"] is not None else None
        table.add_row(str(row["strategy"]), str(row["cards"]), *cells, style=style)
    return table


def _title(workload: str, rows: Sequence[Row]) -> str:
    row = rows[0]
    sizes = f"global batch {row['batch']:,}" if row["scaling"] == "strong" else f"{row['per_card_batch']:,} a card"
    cards = "simulated cards" if row["simulated"] else "GPUs"
    return f"{workload}: {sizes} ({row['scaling']} scaling), precision {row['precision']}, {cards}"
