"""A pipeline's timeline as a table and as a plot."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree

import pytest
from rich.console import Console

from manycard.pipeline.timeline import Span, Timeline
from manycard.report import benchmark_page, print_benchmark
from manycard.report.timeline import print_timeline, timeline_plot

from .documents import document, row


def timeline() -> Timeline:
    """Two cards; the second is idle for the first half of the time and busy for the rest."""
    spans = (
        Span("cuda:0", 0, False, 0, 1.0, 1.5),
        Span("cuda:1", 1, False, 0, 1.5, 1.7),
        Span("cuda:1", 1, True, 0, 1.7, 2.0),
    )
    return Timeline("1f1b", 1, ("cuda:0", "cuda:1"), ("wte to h.5", "h.6 to head"), spans, (1, 1), (2048, None), False)


def test_the_table_has_a_row_a_card_and_the_bubble() -> None:
    text = io.StringIO()
    print_timeline(timeline().as_dict(), Console(file=text, width=100))
    lines = text.getvalue().splitlines()
    assert lines[0] == "pipeline 1f1b, 2 stages, 1 micro-batch"
    (first,) = [line.split() for line in lines if "cuda:0" in line]
    (second,) = [line.split() for line in lines if "cuda:1" in line]
    assert first == ["cuda:0", "0:", "wte", "to", "h.5", "500.0", "50.0", "%", "1", "2,048"]
    assert second == ["cuda:1", "1:", "h.6", "to", "head", "500.0", "50.0", "%", "1", "unknown"]
    assert "bubble 50.0 % (stages of equal time: 50.0 %), balance 1.00" in text.getvalue()
    assert "Simulated" not in text.getvalue()


def test_the_plot_has_a_bar_a_pass() -> None:
    pytest.importorskip("matplotlib")
    plot = timeline_plot(timeline().as_dict())
    root = ElementTree.fromstring(plot)
    assert root.tag.endswith("svg")
    assert plot.count("#2563eb") == 2
    assert plot.count("#d97706") == 1


def test_a_benchmark_shows_the_timelines_of_its_pipelines() -> None:
    found = timeline().as_dict()
    rows = [row("single", 1, 4700.0), row("pipeline", 2, 8000.0, timeline=found), row("dp", 2, 9000.0, timeline=None)]
    text = io.StringIO()
    print_benchmark(document(rows, 2), Console(file=text, width=140))
    assert text.getvalue().count("pipeline 1f1b, 2 stages") == 1
    page = benchmark_page(document(rows, 2))
    assert "Pipeline on 2" in page
    assert "bubble 50.0 %, of stages of equal time 50.0 %; balance of busy times 1.00" in page
