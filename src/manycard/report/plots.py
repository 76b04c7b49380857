"""Plots of a benchmark, as SVG text. Decides nothing: every figure comes from the rows.

A strategy has the same colour in every plot. With one card count speeds are bars; with several they are lines
over the count, beside the line of perfect scaling.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from manycard.errors import MissingExtraError
from manycard.report import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["efficiency_plot", "losses_plot", "memory_plot", "speed_plot", "svg"]

Row = Mapping[str, Any]
_COLOURS = {
    "single": "#6b7280",
    "torch_dp": "#d97706",
    "dp": "#2563eb",
    "ddp": "#059669",
    "fsdp": "#7c3aed",
    "manual": "#db2777",
    "pipeline": "#0891b2",
}
_OTHER_COLOUR = "#111827"
_LINES = ("-", "--", ":", "-.")
"""Rows of one strategy with other settings."""
_MARKERS = ("o", "s", "^", "D")
_STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": "#374151",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e5e7eb",
    "xtick.color": "#374151",
    "ytick.color": "#374151",
    "legend.frameon": False,
    "legend.handlelength": 3.5,
    "svg.hashsalt": "manycard",
}


def speed_plot(rows: Sequence[Row]) -> str | None:
    """Samples a second by strategy; None when no row has any."""
    rows = [row for row in rows if row["samples_per_s"] is not None]
    if not rows:
        return None
    base = next((row["samples_per_s"] for row in rows if row["strategy"] == "single"), None)

    def draw(axes: Axes) -> None:
        if _counts(rows) <= 1:
            _bars(axes, rows, "samples_per_s", figures.speed)
        else:
            _lines(axes, rows, "samples_per_s")
            if base is not None:
                largest = max(row["cards"] for row in rows)
                axes.plot([1, largest], [base, base * largest], ":", color="#9ca3af", label="perfect scaling")
            axes.legend()
        axes.set_ylabel(f"{rows[0]['unit']} a second")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        axes.set_ylim(bottom=0)

    return svg(draw)


def efficiency_plot(rows: Sequence[Row]) -> str | None:
    """Speed-up / cards by strategy; None when no row on several cards has any."""
    rows = [row for row in rows if row["efficiency"] is not None and row["strategy"] != "single"]
    if not rows:
        return None

    def draw(axes: Axes) -> None:
        if _counts(rows) <= 1:
            _bars(axes, rows, "efficiency", lambda value: f"{100 * value:.0f} %")
        else:
            _lines(axes, rows, "efficiency")
            axes.legend()
        axes.axhline(1.0, linestyle=":", color="#9ca3af")
        axes.set_ylabel("efficiency (speed-up / cards)")
        axes.set_ylim(0, max(1.1, 1.1 * max(row["efficiency"] for row in rows)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")

    return svg(draw)


def losses_plot(rows: Sequence[Row]) -> str | None:
    """Losses over steps, every row on one axis; None when no row has any."""
    rows = [row for row in rows if any(value is not None for value in row["losses"])]
    if not rows:
        return None

    def draw(axes: Axes) -> None:
        for number, row in enumerate(rows):
            values = [float("nan") if value is None else value for value in row["losses"]]
            steps = range(1, len(values) + 1)
            axes.plot(steps, values, color=_colour(row), label=_label(row, rows), **_stroke(number, rows))
        axes.set_xlabel("step")
        axes.set_ylabel("loss (mean over the global batch)")
        axes.legend(ncols=2 if len(rows) > 6 else 1)

    return svg(draw, width=9.6)


def memory_plot(rows: Sequence[Row]) -> str | None:
    """Peak memory of every card; None when it isn't known for any."""
    rows = [row for row in rows if any(peak is not None for peak in row["peak_memory_mib"])]
    if not rows:
        return None

    def draw(axes: Axes) -> None:
        most = max(len(row["peak_memory_mib"]) for row in rows)
        width = 0.8 / most
        for place, row in enumerate(rows):
            peaks = row["peak_memory_mib"]
            for card, peak in enumerate(peaks):
                left = place + (card - (len(peaks) - 1) / 2) * width
                axes.bar(left, (peak or 0) / 1024, width * 0.9, color=_colour(row), alpha=1 if card == 0 else 0.6)
        _name_places(axes, rows)
        axes.set_ylabel("peak memory, GiB (a bar a card)")

    return svg(draw, width=9.6)


def _bars(axes: Axes, rows: Sequence[Row], key: str, write: Callable[[float], str]) -> None:
    bars = axes.bar(range(len(rows)), [row[key] for row in rows], width=0.62, color=[_colour(row) for row in rows])
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    if key == "samples_per_s":
        axes.errorbar(
            range(len(rows)),
            [row[key] for row in rows],
            _reach(rows),
            fmt="none",
            ecolor="#374151",
            capsize=3,
            linewidth=1,
        )
    axes.bar_label(bars, [write(row[key]) for row in rows], padding=3, color="#374151", bbox=behind)
    _name_places(axes, rows)
    axes.margins(y=0.15)


def _name_places(axes: Axes, rows: Sequence[Row]) -> None:
    """Write the rows' names under their bars, and keep one or two bars from filling the whole width."""
    many = len(rows) > 6 or any(len(_label(row, rows)) > 16 for row in rows)
    turned: dict[str, Any] = {"rotation": 30, "ha": "right", "fontsize": 8} if many else {}
    axes.set_xticks(range(len(rows)), [_label(row, rows) for row in rows], **turned)
    middle, reach = (len(rows) - 1) / 2, max(len(rows) / 2, 1.7)
    axes.set_xlim(middle - reach, middle + reach)


def _lines(axes: Axes, rows: Sequence[Row], key: str) -> None:
    strategies: dict[str, int] = {}
    for name in dict.fromkeys(_series(row) for row in rows):
        mine = sorted((row for row in rows if _series(row) == name), key=lambda row: row["cards"])
        place = strategies[mine[0]["strategy"]] = strategies.get(mine[0]["strategy"], -1) + 1
        line, marker = _LINES[place % len(_LINES)], _MARKERS[place % len(_MARKERS)]
        counts, values = [row["cards"] for row in mine], [row[key] for row in mine]
        axes.plot(counts, values, line, marker=marker, color=_colour(mine[0]), label=name)
        if key == "samples_per_s":
            axes.errorbar(counts, values, _reach(mine), fmt="none", ecolor=_colour(mine[0]), capsize=2, linewidth=1)
    axes.set_xticks(sorted({row["cards"] for row in rows}))
    axes.set_xlabel("cards")


def _series(row: Row) -> str:
    """The strategy, and the settings that the row was given."""
    words = ", ".join(f"{name}={figures.setting(value)}" for name, value in (row.get("settings") or {}).items())
    return f"{row['strategy']} {words}".rstrip()


def _reach(rows: Sequence[Row]) -> list[list[float]]:
    """How far the spread of each row reaches below and above its figure."""
    spreads = [row.get("spread") or [row["samples_per_s"]] * 2 for row in rows]
    middles = [row["samples_per_s"] for row in rows]
    return [
        [max(middle - low, 0.0) for (low, _), middle in zip(spreads, middles, strict=True)],
        [max(high - middle, 0.0) for (_, high), middle in zip(spreads, middles, strict=True)],
    ]


def _counts(rows: Sequence[Row]) -> int:
    """How many card counts the strategies have; ``single`` has one by nature."""
    return len({row["cards"] for row in rows if row["strategy"] != "single"})


def _colour(row: Row) -> str:
    return _COLOURS.get(row["strategy"], _OTHER_COLOUR)


def _label(row: Row, rows: Sequence[Row]) -> str:
    """The strategy, with its card count where that is needed to tell rows apart."""
    name = _series(row)
    if row["strategy"] != "single" and _counts(rows) > 1:
        name = f"{row['strategy']}, {row['cards']}{name.removeprefix(row['strategy'])}"
    return name.replace(" ", "\n", 1) if row.get("settings") else name


def _stroke(number: int, rows: Sequence[Row]) -> dict[str, Any]:
    """How the line of row `number` is drawn, so that each shows where all lie on each other.

    With one global batch they should: the first is a wide pale band and the others take turns in dashes on it.
    """
    others = len(rows) - 1
    if len({row["batch"] for row in rows}) > 1 or others > 5:
        return {"linewidth": 1.3, "alpha": 0.8}
    if number == 0:
        return {"linewidth": 6 if others else 1.6, "alpha": 0.35 if others else 1, "solid_capstyle": "round"}
    dash = 5.0
    gaps = (dash, dash * (others - 1)) if others > 1 else (dash, dash / 2)
    return {"linewidth": 1.8, "linestyle": (-dash * (number - 1), gaps)}


def svg(draw: Callable[[Axes], None], *, width: float = 4.7, height: float = 3.2) -> str:
    """What `draw` draws, as SVG text; sizes are in inches.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "report", "the HTML report") from error

    with mpl.rc_context(_STYLE):
        # A Figure of its own, not pyplot's: pyplot keeps state and may look for a screen.
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure.add_subplot())
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()
