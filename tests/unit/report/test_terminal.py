"""Tables for the terminal hold every row, every figure and every error."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from manycard.report import benchmark_markdown, print_benchmark
from tests.unit.report.documents import EIGHT_CARDS, ONE_CARD, SIMULATED, document, row


def printed(results: dict[str, Any]) -> str:
    text = io.StringIO()
    print_benchmark(results, Console(file=text, width=80))
    return text.getvalue()


def test_every_row_is_there_with_its_figures() -> None:
    text = printed(EIGHT_CARDS)
    for line in ("dp", "ddp", "36,000", "96 %", "7.66x", "24,600 to 25,300"):
        assert line in text
    assert "resnet50: 256 a card (weak scaling), precision bf16, GPUs" in text
    assert "gpt2: " in text
    assert "sequences/s" in text


def test_an_error_is_shown_in_full_under_its_table() -> None:
    assert "torch_dp on 8: out of memory: CUDA out of memory. Tried to allocate 12.00 GiB" in printed(EIGHT_CARDS)


def test_accuracy_has_a_column_where_there_is_any_and_memory_always() -> None:
    assert "accuracy" not in printed(ONE_CARD)
    assert "differ" not in printed(ONE_CARD)
    assert "accuracy" in printed(SIMULATED)
    unknown = printed(document([row("single", 1, 900.0, peak_memory_mib=[None], balance=None)], 1))
    assert "balance" in unknown
    assert "memory" in unknown


def test_shares_have_a_column_where_cards_have_any() -> None:
    assert "shares" not in printed(SIMULATED)
    text = printed(document([row("dp", 2, 900.0), row("manual", 2, 1200.0, shares=[0.75, 0.25])], 2))
    assert "shares" in text
    assert "75 / 25 %" in text


def test_simulated_cards_are_called_that_and_notes_follow() -> None:
    text = printed(SIMULATED)
    assert "simulated cards" in text
    assert "The cards are simulated <and share one CPU>." in text
    assert "1.6e-06" in text
    assert "97.5 %" in text


def test_an_interrupted_run_says_so_even_without_rows() -> None:
    assert "Interrupted" in printed(document([], 1, interrupted=True))


def test_a_narrow_terminal_gets_two_tables_with_nothing_cut_off() -> None:
    text = io.StringIO()
    print_benchmark(EIGHT_CARDS, Console(file=text, width=80, force_terminal=True, color_system=None))
    lines = text.getvalue().splitlines()
    assert "…" not in text.getvalue()
    assert max(map(len, lines)) <= 80
    assert sum("torch_dp" in line for line in lines) == 3, "a line in each of two tables, and the error"


CAUSE = {
    "cause": "the cards wait for data",
    "evidence": "2 of 9 ms a step wait for the loader",
    "fix": "raise num_workers from 2 to 8",
    "severity": "warning",
    "gain": 1.286,
    "part": "input",
}


def test_what_holds_a_row_back_is_said_with_its_gain_evidence_and_fix() -> None:
    rows = [row("single", 1, 900.0), row("dp", 2, 900.0, findings=[CAUSE]), row("ddp", 2, 800.0, findings=[])]
    rows += [row("fsdp", 2, 700.0, findings=None), row("manual", 2, 9000.0, findings=None)]
    text = printed(document(rows, 2))
    assert "What holds rows back (efficiency under 90 %)" in text
    assert "dp on 2: efficiency 10 %" in text
    assert "1 the cards wait for data: up to 1.29x" in text
    assert "seen  2 of 9 ms a step wait for the loader" in text
    assert "fix   raise num_workers from 2 to 8" in text
    assert "ddp on 2: efficiency 9 %; nothing was found that is looked for" in text
    assert "fsdp on 2: efficiency 7 %; it ended before steps could be recorded that say why" in text
    assert "manual on 2: efficiency" not in text
    page = benchmark_markdown(document(rows, 2))
    assert "### What holds rows back" in page
    assert (
        "  1. **the cards wait for data: up to 1.29x.** Seen: 2 of 9 ms a step wait for the loader. Fix: raise" in page
    )


def test_nothing_is_said_where_nothing_was_looked_for() -> None:
    assert "holds" not in printed(EIGHT_CARDS)
    assert "holds" not in benchmark_markdown(EIGHT_CARDS)
