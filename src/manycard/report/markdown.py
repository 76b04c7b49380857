"""Results of a benchmark as Markdown, to paste into an issue or a document. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from manycard.report import figures
from manycard.report.causes import causes_markdown
from manycard.report.columns import cells, label_columns, remarks, rest_columns, row_name, speed_columns
from manycard.report.terminal import COMPARISON_HEADINGS, comparison_cells, section_title
from manycard.report.timeline import TIMELINE_HEADINGS, timeline_cells, timeline_summary, timeline_title

__all__ = ["benchmark_markdown", "machine_line", "markdown_table"]


def benchmark_markdown(document: Mapping[str, Any]) -> str:
    """The tables of `document` as Markdown text."""
    lines = ["# manycard benchmark", "", machine_line(document["machine"]), ""]
    for workload, rows in figures.workloads_of(document["rows"]).items():
        columns = [*label_columns(rows), *speed_columns(rows), *rest_columns(rows)]
        headings = [column.heading.replace("-\n", "").replace("_\n", "_").replace("\n", " ") for column in columns]
        lines += ["## " + section_title(workload, rows), ""]
        lines += markdown_table(headings, [cells(row, columns) for row in rows], text_columns=1)
        lines += ["", *(f"- {words}" for words, _ in remarks(rows)), ""]
        for row in rows:
            if row.get("timeline") is not None:
                lines += _timeline(row)
        lines += causes_markdown(rows)
    comparison = document.get("comparison")
    if comparison:
        lines += [f"## Against {comparison['against']}", ""]
        lines += markdown_table(
            COMPARISON_HEADINGS, [comparison_cells(row) for row in comparison["rows"]], text_columns=1
        )
        lines += ["", *(f"- {note}" for note in comparison["notes"]), ""]
    lines += [f"- {note}" for note in document["notes"]]
    if document["interrupted"]:
        lines.append("- Interrupted: these are the rows that were done.")
    return "\n".join(lines).rstrip() + "\n"


def _timeline(row: Mapping[str, Any]) -> list[str]:
    """Where the time of a pipeline's cards went."""
    found = row["timeline"]
    headings = [heading.replace("-\n", "-", 1).replace("mem-ory", "memory") for heading in TIMELINE_HEADINGS]
    title = f"### {row_name(row)}: {timeline_title(found).removeprefix('pipeline ')}"
    return [
        title,
        "",
        *markdown_table(headings, timeline_cells(found), text_columns=2),
        "",
        timeline_summary(found),
        "",
    ]


def machine_line(machine: Mapping[str, Any]) -> str:
    """What was measured on."""
    models = [card["model"] for card in machine["cards"]]
    kinds = ", ".join(f"{models.count(model)} x {model}" for model in dict.fromkeys(models))
    return (
        f"{kinds}; {machine['cpu_cores']} CPU cores; torch {machine['torch']}, Python {machine['python']}, manycard"
        f" {machine['manycard']}; {machine['measured_at']}"
    )


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int) -> list[str]:
    """A table's lines.

    Args:
        text_columns: how many columns from the left hold words; the others are aligned to the right.

    Example:
        >>> markdown_table(["way", "speed"], [["a|b", "1.0"]], 1)
        ['| way | speed |', '|---|---:|', '| a\\\\|b | 1.0 |']
    """
    marks = ["---" if place < text_columns else "---:" for place in range(len(headings))]
    lines = ["| " + " | ".join(headings) + " |", "|" + "|".join(marks) + "|"]
    return [*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)]
