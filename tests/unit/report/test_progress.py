"""Bars on a terminal, lines anywhere else."""

from __future__ import annotations

import io

from rich.console import Console

from manycard.report import BenchmarkProgress
from tests.unit.report.documents import OUT_OF_MEMORY, row


def shown(*, terminal: bool) -> str:
    text = io.StringIO()
    with BenchmarkProgress(Console(file=text, force_terminal=terminal, width=150)) as bars:
        bars.started("resnet50 dp on 2 cards", 1, 3)
        bars.progressed(3, 25)
        bars.progressed(25, 25)
        bars.finished(row("dp", 2, 9000.0))
        bars.started("resnet50 torch_dp on 8 cards", 1, 3)
        bars.finished({**OUT_OF_MEMORY, "error": "failed at [enforce fail]"})
    return text.getvalue()


def test_a_log_gets_a_line_for_every_row() -> None:
    assert shown(terminal=False).splitlines() == [
        "resnet50 dp on 2 cards, round 1 of 3 ...",
        "resnet50 dp on 2 cards, round 1 of 3: 9,000 images/s",
        "resnet50 torch_dp on 8 cards, round 1 of 3 ...",
        "resnet50 torch_dp on 8 cards, round 1 of 3: failed: failed at [enforce fail]",
    ]


def test_a_terminal_gets_bars_with_what_rows_found() -> None:
    text = shown(terminal=True)
    assert "25/25" in text
    assert "9,000 images/s" in text
    assert "failed at [enforce fail]" in text
