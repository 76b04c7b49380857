"""What each setting is worth: the table, Markdown, and plots that show every row."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.console import Console

from manycard.report import ablation_markdown, print_ablation, write_ablation_page
from manycard.report.ablation_page import alone_plot, waterfall_plot
from tests.unit.report.documents import document, row


def made(part: str, step: str, speed: float | None, gain: float | None, **changed: Any) -> dict[str, Any]:
    own = {"part": part, "step": step, "title": f"the {step}", "gain": gain, "total": gain, "skipped": None}
    extra = {"noise": 0.01, "first_step_s": 9.0, "joules_per_sample": 0.25}
    return row("torch_dp", 2, speed, **{**own, **extra, **changed})


ROWS = [
    made("baseline", "baseline", 3000.0, None),
    made("alone", "engine", 6000.0, 2.0),
    made("alone", "cards", None, None, skipped="all are chosen", joules_per_sample=None),
    made("alone", "compile", None, None, error="out of memory: <no>", joules_per_sample=None),
    made("together", "precision", 2700.0, 0.9),
    made("together", "engine", 9600.0, 3.2),
]
DOCUMENT = document(ROWS, 2, settings={"workloads": ["resnet50"], "batch": 512, "files": "/data", "lengths": {}})


def test_the_table_has_gains_and_says_why_rows_have_none() -> None:
    text = io.StringIO()
    print_ablation(DOCUMENT, Console(file=text, width=140))
    for words in ("all together: 3.20x of plain", "not here, all are chosen", "out of memory: <no>", "0.90x", "9,600"):
        assert words in text.getvalue()


def test_markdown_has_the_same_rows() -> None:
    text = ablation_markdown(DOCUMENT)
    assert "| the engine | 9,600 | 1.0 % | 3.20x | 3.20x |" in text
    assert "2 x NVIDIA H200" in text


def test_the_waterfall_goes_from_baseline_to_all() -> None:
    svg = waterfall_plot(ROWS)
    assert svg is not None
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    for words in ("baseline", "the precision", "the engine", "3,000", "9,600"):
        assert f"<!-- {words} -->" in svg
    assert "<!-- the cards -->" not in svg
    assert waterfall_plot(ROWS[:1]) is None
    assert alone_plot(ROWS[:1]) is None


def test_the_page_is_whole(tmp_path: Path) -> None:
    write_ablation_page(DOCUMENT, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert text.count("data:image/svg+xml") == 2
    assert "out of memory: &lt;no&gt;" in text


def test_a_run_that_was_ended_at_once_can_be_shown(tmp_path: Path) -> None:
    empty = document([], 2, settings=DOCUMENT["settings"], interrupted=True)
    print_ablation(empty, Console(file=io.StringIO()))
    assert "What each setting is worth" in ablation_markdown(empty)
