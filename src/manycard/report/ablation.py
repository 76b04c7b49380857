"""What each setting is worth, as a table for the terminal and as Markdown. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from manycard.report import figures
from manycard.report.markdown import machine_line, markdown_table
from manycard.report.terminal import COMPARISON_HEADINGS, comparison_cells, print_comparison, widen

__all__ = ["PARTS", "ablation_cells", "ablation_headings", "ablation_markdown", "ablation_title", "print_ablation"]

Row = Mapping[str, Any]
PARTS = (("alone", "each alone"), ("together", "one after another"))


def ablation_title(document: Mapping[str, Any]) -> str:
    """What was taken apart, in one line."""
    settings = document["settings"]
    data = "from files" if settings["files"] else "batches in memory"
    total = total_gain(document["rows"])
    gain = "" if total is None else f"; all together: {figures.times(total)} of plain nn.DataParallel"
    return f"{settings['workloads'][0]}: global batch {settings['batch']:,}, {data}{gain}"


def total_gain(rows: Sequence[Row]) -> float | None:
    """The speed of the last row of those put together, over the baseline's."""
    totals = [row["total"] for row in rows if row["part"] == "together" and row["total"] is not None]
    return totals[-1] if totals else None


def ablation_headings(rows: Sequence[Row]) -> list[str]:
    """The headings over `ablation_cells`."""
    energy = ["J a sample"] if _has_energy(rows) else []
    return ["setting", f"{rows[0]['unit']}/s", "±", "gain", "÷ baseline", "peak MiB a card", *energy, "first step, s"]


def ablation_cells(row: Row, rows: Sequence[Row]) -> list[str]:
    """One row as text; what it lacks figures for is said in the first cell's line."""
    why = row["skipped"] or row["error"]
    title = row["title"] if why is None else f"{row['title']}: {'not here, ' if row['skipped'] else ''}{why}"
    energy = [figures.energy(row["joules_per_sample"])] if _has_energy(rows) else []
    return [
        title,
        figures.speed(row["samples_per_s"]),
        figures.percent(row["noise"], 1),
        figures.times(row["gain"]),
        figures.times(row["total"]),
        figures.memory(row["peak_memory_mib"]),
        *energy,
        figures.speed(row["first_step_s"]),
    ]


def print_ablation(document: Mapping[str, Any], console: Console) -> None:
    """Print the table: baseline, each setting alone, and one after another."""
    widen(console)
    rows = document["rows"]
    if rows:
        console.print(Text(ablation_title(document), style="bold"))
        table = Table(header_style="bold", box=box.SIMPLE_HEAD, collapse_padding=True)
        for place, heading in enumerate(ablation_headings(rows)):
            table.add_column(heading, justify="right" if place else "left", no_wrap=place > 0, overflow="fold")
        for row in rows:
            if row["part"] == "baseline":
                table.add_row(*ablation_cells(row, rows))
        for part, words in PARTS:
            table.add_section()
            table.add_row(Text(words, style="bold"))
            for row in rows:
                if row["part"] == part:
                    style = "dim" if row["skipped"] else "red" if row["error"] else None
                    table.add_row(*ablation_cells(row, rows), style=style)
        console.print(table)
    for note in document["notes"]:
        console.print(Text(note, style="yellow"))
    if document["interrupted"]:
        console.print(Text("Interrupted: these are the rows that were done.", style="bold yellow"))
    if document.get("comparison"):
        print_comparison(document["comparison"], console)


def ablation_markdown(document: Mapping[str, Any]) -> str:
    """The table as Markdown text."""
    rows = document["rows"]
    lines = ["# What each setting is worth", "", machine_line(document["machine"]), ""]
    if rows:
        lines += [ablation_title(document), ""]
        made = [ablation_cells(row, rows) for row in rows if row["part"] == "baseline"]
        for part, words in PARTS:
            made.append([f"**{words}**", *([""] * (len(made[0]) - 1))])
            made += [ablation_cells(row, rows) for row in rows if row["part"] == part]
        lines += [*markdown_table(ablation_headings(rows), made, text_columns=1), ""]
    if document.get("comparison"):
        lines += [f"## Against {document['comparison']['against']}", ""]
        compared = [comparison_cells(row) for row in document["comparison"]["rows"]]
        lines += [*markdown_table(COMPARISON_HEADINGS, compared, text_columns=1), ""]
    lines += [f"- {note}" for note in document["notes"]]
    return "\n".join(lines).rstrip() + "\n"


def _has_energy(rows: Sequence[Row]) -> bool:
    return any(row["joules_per_sample"] is not None for row in rows)
