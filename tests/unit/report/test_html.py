"""The HTML page is whole, valid enough to parse, and needs nothing from elsewhere."""

from __future__ import annotations

import base64
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from manycard.errors import MissingExtraError
from manycard.report import benchmark_page, write_benchmark_page
from tests.unit.report.documents import EIGHT_CARDS, ONE_CARD, SIMULATED, document, row

VOID = {"meta", "br", "img", "link"}


class Page(HTMLParser):
    """What a page shows; fails where tags don't match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        if tag == "img":
            self.images.append(dict(attrs))
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.rows[-1].append(data.strip())


@pytest.mark.parametrize(
    ("results", "images"), [(ONE_CARD, 3), (EIGHT_CARDS, 8), (SIMULATED, 3)], ids=["one", "eight", "simulated"]
)
def test_every_plot_is_an_svg_inside_the_page(results: dict[str, Any], images: int) -> None:
    page = Page(benchmark_page(results))
    assert len(page.images) == images
    for image in page.images:
        kind, _, data = str(image["src"]).partition(",")
        assert kind == "data:image/svg+xml;base64"
        assert ElementTree.fromstring(base64.b64decode(data)).tag.endswith("svg")
        assert image["alt"]


def test_the_page_fetches_nothing() -> None:
    text = benchmark_page(EIGHT_CARDS)
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:)""", text)
    assert "@import" not in text
    assert "<script" not in text
    assert "url(" not in text


def test_the_table_has_every_row_and_every_error() -> None:
    rows = [cells for cells in Page(benchmark_page(EIGHT_CARDS)).rows if cells]
    assert len(rows) == len(EIGHT_CARDS["rows"])
    assert rows[5][:8] == ["dp", "8", "2,048", "36,000", "–", "56.9", "7.66x", "96 %"]
    assert rows[7][-1].startswith("out of memory: ")


def test_a_round_that_failed_is_shown_beside_the_figures_of_the_others() -> None:
    text = benchmark_page(document([row("dp", 2, 9000.0, error="rank 1: broken")], 2))
    assert "9,000" in text
    assert "rank 1: broken" in text


def test_shares_have_a_column_where_cards_have_any() -> None:
    uneven = [row("dp", 2, 900.0), row("manual", 2, 1200.0, shares=[0.75, 0.25])]
    assert ["75 / 25 %" in cells for cells in Page(benchmark_page(document(uneven, 2))).rows] == [False, False, True]
    assert "Shares" not in benchmark_page(SIMULATED)


def test_text_from_results_is_escaped() -> None:
    text = benchmark_page(SIMULATED)
    assert "&lt;and share one CPU&gt;" in text
    assert "<and share" not in text


def test_a_run_of_failures_alone_gives_a_page() -> None:
    page = Page(benchmark_page(document([row("single", 1, None, error="no")], 1, interrupted=True)))
    assert page.images == []


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_package_is_said_and_nothing_is_written(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"{package}.*manycard\[report\]"):
        write_benchmark_page(ONE_CARD, tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_what_holds_rows_back_is_on_the_page_and_is_escaped() -> None:
    cause = {
        "cause": "the cards wait <for> data",
        "evidence": "2 of 9 ms",
        "fix": "raise num_workers",
        "severity": "warning",
        "gain": 1.286,
    }
    page = benchmark_page(document([row("single", 1, 900.0), row("dp", 2, 900.0, findings=[cause])], 2))
    Page(page)
    assert "the cards wait &lt;for&gt; data: up to 1.29x" in page
    assert "dp on 2: efficiency 10 %" in page
    assert "What holds rows back" not in benchmark_page(EIGHT_CARDS)
