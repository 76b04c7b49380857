"""Results of a benchmark as one HTML file that needs nothing beside it. Decides nothing: every figure comes from
the rows.

Plots are SVG inside the page, as images with data addresses: no script, no font and no style comes from
elsewhere, so the file can be mailed and opens without a network.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manycard.errors import MissingExtraError
from manycard.report import figures
from manycard.report.causes import HEADING, causes_of
from manycard.report.columns import label_columns, remarks, rest_columns, row_name, speed_columns
from manycard.report.terminal import COMPARISON_HEADINGS, comparison_cells, section_title

__all__ = ["benchmark_page", "data_address", "environment", "write_benchmark_page"]

Row = Mapping[str, Any]
_NARROW = ("Throughput", "Efficiency")


def write_benchmark_page(document: Mapping[str, Any], path: Path) -> None:
    """Write the page of `document` to `path`.

    Raises:
        MissingExtraError: matplotlib or jinja2 is not installed; nothing was written.
    """
    path.write_text(benchmark_page(document), encoding="utf-8")


def benchmark_page(document: Mapping[str, Any]) -> str:
    """The page as text.

    Args:
        document: what ``manycard bench --json`` prints.

    Raises:
        MissingExtraError: matplotlib or jinja2 is not installed.
    """
    sections = [_section(name, rows) for name, rows in figures.workloads_of(document["rows"]).items()]
    template = environment().get_template("benchmark.html")
    shown = {"comparison": None, **document}
    page: str = template.render(
        document=shown, sections=sections, comparison_headings=COMPARISON_HEADINGS, causes_heading=HEADING
    )
    return page


def environment() -> Any:
    """Where pages are made.

    Raises:
        MissingExtraError: jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise MissingExtraError("jinja2", "report", "the HTML report") from error

    made = jinja2.Environment(
        loader=jinja2.PackageLoader("manycard.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(heading=_heading, comparison=comparison_cells)
    return made


def _section(workload: str, rows: Sequence[Row]) -> dict[str, Any]:
    """What the template needs to know about one workload."""
    from manycard.report import plots

    labels = label_columns(rows)
    speed, efficiency, losses, memory = _captions(rows)
    drawn = (
        ("Throughput", speed, plots.speed_plot(rows)),
        ("Efficiency", efficiency, plots.efficiency_plot(rows)),
        ("Losses", losses, plots.losses_plot(rows)),
        ("Memory", memory, plots.memory_plot(rows)),
        *(_pipeline(row) for row in rows if row.get("timeline") is not None),
    )
    return {
        "name": workload,
        "rows": rows,
        "title": section_title(workload, rows).partition(": ")[2],
        "labels": labels,
        "columns": [*labels, *speed_columns(rows), *rest_columns(rows)],
        "remarks": remarks(rows),
        "causes": causes_of(rows),
        "plots": [
            {"title": title, "caption": caption, "source": data_address(svg), "wide": not title.startswith(_NARROW)}
            for title, caption, svg in drawn
            if svg is not None
        ],
    }


def _pipeline(row: Row) -> tuple[str, str, str]:
    """The plot of a pipeline's timeline."""
    from manycard.report.timeline import timeline_plot, timeline_summary

    found = row["timeline"]
    busy = ", ".join(
        f"{card} {figures.speed(1000 * seconds)} ms"
        for card, seconds in zip(found["cards"], found["busy_seconds"], strict=True)
    )
    caption = f"Passes of one step, card by card. Busy: {busy}; {timeline_summary(found)} of busy times."
    name = row_name(row)
    return name[:1].upper() + name[1:], caption, timeline_plot(found)


def _captions(rows: Sequence[Row]) -> tuple[str, str, str, str]:
    """What to know when looking at the plots of speed, efficiency, losses and memory."""
    limit = " Simulated cards: no measure of speed." if rows[0]["simulated"] else ""
    one_batch = len({row["batch"] for row in rows}) == 1
    return (
        f"{str(rows[0]['unit']).capitalize()} a second, all cards together." + limit,
        "Speed-up over single, divided by the number of cards." + limit,
        "All rows had the same global batches: the same training gives lines that lie on each other."
        if one_batch
        else "Rows with different global batches see different data and have different losses.",
        "The most that torch's allocator held on each card.",
    )


def _heading(text: str) -> str:
    """A column's heading on one line, for a browser to break."""
    words = text.replace("-\n", "").replace("_\n", "_").replace("\n", " ")
    return words[:1].upper() + words[1:]


def data_address(svg: str) -> str:
    """An image's address that holds the image."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
