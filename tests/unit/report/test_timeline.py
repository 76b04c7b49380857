"""A pipeline's timeline as a table and as a plot."""

from __future__ import annotations

import csv
import io
import xml.etree.ElementTree as ElementTree

import pytest
from rich.console import Console

from manycard.pipeline.timeline import Span, Timeline
from manycard.report import benchmark_markdown, benchmark_page, print_benchmark, rows_as_csv
from manycard.report.timeline import print_timeline, timeline_plot

from .documents import document, row

SUMMARY = "bubble 58.3 % (stages of equal time: 50.0 %, these stages without copies and launches: 50.0 %), balance 1.00"


def timeline() -> Timeline:
    """Two cards that are never at work together, and wait for a copy twice."""
    spans = (
        Span("cuda:0", 0, False, 0, 1.0, 1.4),
        Span("cuda:1", 1, False, 0, 1.5, 1.7),
        Span("cuda:1", 1, True, 0, 1.7, 2.0),
        Span("cuda:0", 0, True, 0, 2.1, 2.2),
    )
    return Timeline("1f1b", 1, ("cuda:0", "cuda:1"), ("wte to h.5", "h.6 to head"), spans, (1, 1), (2048, None), False)


def test_the_table_has_a_row_a_card_and_the_bubble() -> None:
    text = io.StringIO()
    print_timeline(timeline().as_dict(), Console(file=text, width=140))
    lines = text.getvalue().splitlines()
    assert lines[0] == "pipeline 1f1b, 2 stages, 1 micro-batch"
    (first,) = [line.split() for line in lines if "cuda:0" in line]
    (second,) = [line.split() for line in lines if "cuda:1" in line]
    assert first == ["cuda:0", "0:", "wte", "to", "h.5", "500.0", "58.3", "%", "1", "2,048"]
    assert second == ["cuda:1", "1:", "h.6", "to", "head", "500.0", "58.3", "%", "1", "unknown"]
    assert SUMMARY in text.getvalue()
    assert "Simulated" not in text.getvalue()


def test_the_plot_has_a_bar_a_pass() -> None:
    pytest.importorskip("matplotlib")
    plot = timeline_plot(timeline().as_dict())
    root = ElementTree.fromstring(plot)
    assert root.tag.endswith("svg")
    assert plot.count("#2563eb") == 2
    assert plot.count("#d97706") == 2


def test_a_benchmark_shows_the_timelines_of_its_pipelines() -> None:
    found = timeline().as_dict()
    pipeline = row("pipeline", 2, 8000.0, timeline=found, settings={"schedule": "1f1b"})
    rows = [row("single", 1, 4700.0), pipeline, row("dp", 2, 9000.0, timeline=None)]
    text = io.StringIO()
    print_benchmark(document(rows, 2), Console(file=text, width=140))
    assert text.getvalue().count("pipeline on 2, schedule=1f1b: 1f1b, 2 stages") == 1
    assert SUMMARY in text.getvalue()
    page = benchmark_page(document(rows, 2))
    assert "Pipeline on 2, schedule=1f1b" in page
    assert f"Busy: cuda:0 500 ms, cuda:1 500 ms; {SUMMARY} of busy times." in page
    markdown = benchmark_markdown(document(rows, 2))
    assert "### pipeline on 2, schedule=1f1b: 1f1b, 2 stages, 1 micro-batch" in markdown
    assert "| cuda:0 | 0: wte to h.5 | 500.0 | 58.3 % | 1 | 2,048 |" in markdown
    assert SUMMARY in markdown
    table = list(csv.DictReader(io.StringIO(rows_as_csv(rows))))
    assert [each["pipeline_expected_bubble"] for each in table] == ["", "0.5", ""]
    assert float(table[1]["pipeline_scheduled_bubble"]) == pytest.approx(0.5)
    assert [float(seconds) for seconds in table[1]["pipeline_busy_seconds"].split(";")] == pytest.approx([0.5, 0.5])
    assert "timeline" not in table[1]


def test_a_timeline_of_earlier_results_is_shown_without_what_it_lacks() -> None:
    found = timeline().as_dict()
    del found["scheduled_bubble"]
    text = io.StringIO()
    print_timeline(found, Console(file=text, width=140))
    assert "bubble 58.3 % (stages of equal time: 50.0 %), balance 1.00" in text.getvalue()
