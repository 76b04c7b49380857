"""Where the cards' time went in one batch of a pipeline: as a table, and as a plot. Decides nothing.

Everything comes from `Timeline.as_dict`, so that a timeline written to a file as JSON is shown like a fresh one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from manycard.report.plots import svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "TIMELINE_HEADINGS",
    "print_timeline",
    "timeline_cells",
    "timeline_plot",
    "timeline_summary",
    "timeline_title",
]

TIMELINE_HEADINGS = ("card", "stage", "busy, ms", "idle", "micro-\nbatches held", "peak mem-\nory, MiB")
_FORWARD, _BACKWARD = "#2563eb", "#d97706"


def print_timeline(document: Mapping[str, Any], console: Console, name: str | None = None) -> None:
    """Print a row a card, and under them the bubble, what it should be, and the balance.

    Args:
        name: of the row of a benchmark that it belongs to.
    """
    table = Table(header_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("card", no_wrap=True)
    table.add_column("stage", overflow="fold", min_width=14)
    for heading in TIMELINE_HEADINGS[2:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for cells in timeline_cells(document):
        table.add_row(*cells)
    title = timeline_title(document)
    console.print(Text(title if name is None else f"{name}: {title.removeprefix('pipeline ')}", style="bold"))
    console.print(table)
    console.print(f"  {timeline_summary(document)}")
    if document["simulated"]:
        note = "  Simulated cards ran in turn; these are their times as cards that run at once would have had them."
        console.print(Text(note, style="yellow"))


def timeline_summary(document: Mapping[str, Any]) -> str:
    """Bubble and balance, beside what they should be, in one line."""
    theory = f"stages of equal time: {100 * document['expected_bubble']:.1f} %"
    # Simulated cards have no others; results of before have no such figure.
    if not document["simulated"] and document.get("scheduled_bubble") is not None:
        theory += f", these stages without copies and launches: {100 * document['scheduled_bubble']:.1f} %"
    return f"bubble {100 * document['bubble']:.1f} % ({theory}), balance {document['balance']:.2f}"


def timeline_cells(document: Mapping[str, Any]) -> list[list[str]]:
    """A row of text a card, under `TIMELINE_HEADINGS`."""
    stages, whole = document["stages"], document["seconds"]
    rows = []
    for place, card in enumerate(document["cards"]):
        busy, peak = document["busy_seconds"][place], document["peak_memory_mib"][place]
        rows.append(
            [
                card,
                f"{place % len(stages)}: {stages[place % len(stages)]}",
                f"{1000 * busy:,.1f}",
                f"{100 * (1 - busy / whole):.1f} %",
                str(document["in_flight"][place]),
                "unknown" if peak is None else f"{peak:,}",
            ]
        )
    return rows


def timeline_plot(document: Mapping[str, Any]) -> str:
    """The passes of every card over time, as SVG text.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    cards = list(document["cards"])
    start = min(span["start"] for span in document["spans"])

    def draw(axes: Axes) -> None:
        for span in document["spans"]:
            left, length = 1000 * (span["start"] - start), 1000 * (span["end"] - span["start"])
            row, colour = cards.index(span["card"]), _BACKWARD if span["backward"] else _FORWARD
            axes.barh(row, length, left=left, height=0.8, color=colour, edgecolor="white", linewidth=0.6)
            if length > 0.02 * 1000 * document["seconds"]:
                number = str(span["micro_batch"])
                axes.text(left + length / 2, row, number, ha="center", va="center", color="white", fontsize=7)
        axes.set_yticks(range(len(cards)), cards)
        axes.invert_yaxis()
        axes.grid(False)
        axes.set_xlabel("ms (forward passes blue, backward passes orange, with their micro-batch)")
        axes.set_title(f"{timeline_title(document)}: bubble {100 * document['bubble']:.1f} %", fontsize=10)

    return svg(draw, width=9.6, height=1.3 + 0.5 * len(cards))


def timeline_title(document: Mapping[str, Any]) -> str:
    """Schedule, stages, replicas and micro-batches, in words."""
    stages, cards = len(document["stages"]), len(document["cards"])
    replicas = f" x {cards // stages} replicas" if cards > stages else ""
    number = document["micro_batches"]
    counted = f"{number} micro-batch{'es'[: 2 * (number != 1)]}"
    return f"pipeline {document['schedule']}, {stages} stage{'s'[: stages != 1]}{replicas}, {counted}"
