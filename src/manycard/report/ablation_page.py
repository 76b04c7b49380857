"""What each setting is worth, as one HTML file with its plots: the waterfall from baseline to all, and each alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manycard.report import figures
from manycard.report.ablation import PARTS, ablation_cells, ablation_headings, ablation_title
from manycard.report.html import data_address, environment
from manycard.report.markdown import machine_line
from manycard.report.plots import svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["alone_plot", "waterfall_plot", "write_ablation_page"]

Row = Mapping[str, Any]
_WHOLE, _UP, _DOWN = "#374151", "#059669", "#dc2626"


def write_ablation_page(document: Mapping[str, Any], path: Path) -> None:
    """Write the page of `document` to `path`.

    Raises:
        MissingExtraError: matplotlib or jinja2 is not installed; nothing was written.
    """
    rows = document["rows"]
    template = environment().get_template("ablation.html")
    drawn = (
        ("From baseline to all", "Each bar adds one setting to all before it.", waterfall_plot(rows)),
        ("Each alone", "Speed over that of the way which the setting stands on.", alone_plot(rows)),
    )
    parts = [("", _lines(rows, "baseline")), *((words, _lines(rows, part)) for part, words in PARTS)]
    page = template.render(
        document=document,
        machine=machine_line(document["machine"]),
        title=ablation_title(document),
        headings=ablation_headings(rows),
        parts=parts,
        plots=[
            {"title": title, "caption": caption, "source": data_address(text)}
            for title, caption, text in drawn
            if text is not None
        ],
    )
    path.write_text(page, encoding="utf-8")


def _lines(rows: Sequence[Row], part: str) -> list[tuple[list[str], str]]:
    return [
        (ablation_cells(row, rows), "skipped" if row["skipped"] else "fails" if row["error"] else "")
        for row in rows
        if row["part"] == part
    ]


def waterfall_plot(rows: Sequence[Row]) -> str | None:
    """Baseline, what each step adds or takes, and the whole; None without a baseline and a step."""
    chain = [row for row in rows if row["part"] != "alone" and row["samples_per_s"] is not None]
    if len(chain) < 2 or chain[0]["part"] != "baseline":
        return None

    def draw(axes: Axes) -> None:
        speeds = [row["samples_per_s"] for row in chain]
        axes.bar(0, speeds[0], width=0.7, color=_WHOLE)
        for place, (before, now) in enumerate(pairwise(speeds), start=1):
            axes.bar(place, now - before, bottom=before, width=0.7, color=_UP if now >= before else _DOWN)
            axes.plot([place - 0.65, place + 0.35], [before, before], color="#9ca3af", linewidth=0.8)
            axes.annotate(
                figures.times(now / before),
                (place, max(before, now)),
                ha="center",
                va="bottom",
                fontsize=8,
                color=_WHOLE,
            )
        axes.bar(len(chain), speeds[-1], width=0.7, color=_WHOLE)
        for place, value in ((0, speeds[0]), (len(chain), speeds[-1])):
            axes.annotate(figures.speed(value), (place, value), ha="center", va="bottom", fontsize=8)
        names = ["baseline", *(row["title"] for row in chain[1:]), "all"]
        axes.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
        axes.set_ylabel(f"{chain[0]['unit']} a second")
        axes.margins(y=0.12)

    return svg(draw, width=9.6, height=4.2)


def alone_plot(rows: Sequence[Row]) -> str | None:
    """What each setting gains alone; None where nothing ran."""
    alone = [row for row in rows if row["part"] == "alone" and row["gain"] is not None]
    if not alone:
        return None

    def draw(axes: Axes) -> None:
        gains = [row["gain"] for row in alone]
        places = range(len(alone))
        reach = [(row["noise"] or 0.0) * row["gain"] for row in alone]
        colours = [_UP if gain >= 1 else _DOWN for gain in gains]
        bars = axes.barh(places, [gain - 1 for gain in gains], left=1, xerr=reach, height=0.65, color=colours)
        axes.bar_label(bars, [figures.times(gain) for gain in gains], padding=4, fontsize=8)
        axes.set_yticks(places, [row["title"] for row in alone], fontsize=8)
        axes.invert_yaxis()
        axes.axvline(1, color="#9ca3af", linewidth=0.8)
        axes.set_xlabel("speed over the same without it")
        axes.margins(x=0.15)

    return svg(draw, width=9.6, height=max(2.0, 0.32 * len(alone) + 0.8))
