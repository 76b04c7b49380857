"""What holds rows of a benchmark back, in words: the same in the terminal, in Markdown and in HTML. Decides nothing.

Rows that are efficient enough have no findings, and nothing is said of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from manycard.report import figures
from manycard.report.columns import row_name

__all__ = ["HEADING", "Causes", "causes_markdown", "causes_of", "print_causes"]

HEADING = "What holds rows back"
_EFFICIENT = 0.9


@dataclass(frozen=True)
class Causes:
    """One row and what holds it back."""

    row: str
    """In words."""
    efficiency: str
    findings: Sequence[Mapping[str, Any]] | None
    """The biggest gain first; none where nothing was found, None where nothing could be looked for."""
    simulated: bool

    @property
    def title(self) -> str:
        """The row and its efficiency, and where nothing was found, that."""
        end = ""
        if self.findings is None:
            end = "; it ended before steps could be recorded that say why"
        elif not self.findings:
            end = f"; {'its cards take turns on one CPU' if self.simulated else 'nothing was found that is looked for'}"
        return f"{self.row}: efficiency {self.efficiency}{end}"


def causes_of(rows: Sequence[Mapping[str, Any]]) -> list[Causes]:
    """The rows that are held back, with what was found."""
    return [
        Causes(row_name(row), figures.percent(row["efficiency"]), row["findings"], row["simulated"])
        for row in rows
        if "findings" in row and row.get("efficiency") is not None and row["efficiency"] < _EFFICIENT
    ]


def print_causes(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print them; nothing where there are none."""
    found = causes_of(rows)
    if not found:
        return
    console.print(Text(f"{HEADING} (efficiency under 90 %)", style="bold"))
    for each in found:
        console.print(Text(f"  {each.title}"))
        grid = Table.grid(padding=(0, 1))
        for number, finding in enumerate(each.findings or (), start=1):
            grid.add_row("   ", Text(str(number), style="bold yellow"), Text(_headline(finding)))
            grid.add_row("", "", Text(f"seen  {finding['evidence']}"))
            grid.add_row("", "", Text(f"fix   {finding['fix']}"))
        if each.findings:
            console.print(grid)


def causes_markdown(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Their lines in Markdown; none where there are none."""
    found = causes_of(rows)
    if not found:
        return []
    lines = [f"### {HEADING}", ""]
    for each in found:
        lines += [f"- {each.title}"]
        lines += [
            f"  {number}. **{_headline(finding)}.** Seen: {finding['evidence']}. Fix: {finding['fix']}."
            for number, finding in enumerate(each.findings or (), start=1)
        ]
    return [*lines, ""]


def _headline(finding: Mapping[str, Any]) -> str:
    return f"{finding['cause']}: up to {figures.times(finding['gain'])}"
