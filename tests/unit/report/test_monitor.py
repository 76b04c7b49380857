"""Histories as bars, tables for terminals, lines for logs."""

from __future__ import annotations

import pytest
from rich.console import Console

from manycard.diagnosis.live import Sample
from manycard.report.monitor import draw, lines, sparkline
from tests.unit.diagnosis.live.made_samples import ranks, samples


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([0, 50, 100], "▁▅█"),
        ([None, 100, None], " █ "),
        ([], ""),
        ([1000, -5], "█▁"),
        (list(range(100)), None),
    ],
)
def test_bars(values: list[float | None], bars: str | None):
    drawn = sparkline(values, 100)
    assert len(drawn) == min(len(values), 12)
    assert bars is None or drawn == bars


def test_bars_of_a_plain_terminal():
    assert sparkline([0, 50, 100], 100, plain=True).isascii()
    assert sparkline([5], 0) == " "


def test_the_table_shows_cards_histories_and_what_is_unequal():
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(draw(samples(5, use=40)))
    console.file.close()
    out = console.export_text()
    for words in (
        "card 0",
        "card 1",
        "H200",
        "97 %",
        "40.0 / 141",
        "610/700 W",
        "58 °C",
        "in  120.0",
        "out 0.0",
        "4242",
    ):
        assert words in out
    assert "▇▇▇▇▇" in out or "█████" in out
    assert "unequal: card 1 is used 40 %" in " ".join(out.split())


def test_lines_one_a_card_and_one_a_run():
    sample = Sample(1.0, samples(1)[0].cards, (ranks(95.0, 90.0),))
    found = lines(sample)
    assert len(found) == 3
    assert "card 0 (NVIDIA H200): use 97 %, memory 40.0 GiB / 141.0 GiB, 610 W, 58 °C" in found[0]
    assert "run 99 on 2 simulated cards (they share the CPU): 1.85 cores CPU" in found[2]
    assert "rank 1: 0.90 cores" in found[2]


def test_nothing_to_show_is_said():
    assert "no GPU (no driver) and no run of manycard" in lines(Sample(1.0, note="no driver"))[0]
