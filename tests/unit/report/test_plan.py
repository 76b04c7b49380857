"""A plan drawn: the branch taken and the number that decided, in the terminal and in a page that stands alone."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from manycard.planner import make_plan
from manycard.report import plan_page, print_plan, write_plan_page
from tests.unit.planner.recorded import cifar, giant, resnet50


def printed(document: dict[str, Any], *, explain: bool = False) -> str:
    out = io.StringIO()
    print_plan(document, Console(file=out, width=140), explain=explain)
    return out.getvalue()


def test_each_fork_is_drawn_with_its_number_under_the_branch_taken() -> None:
    document = make_plan(cifar()).to_document()
    text = printed(document)
    at = 0
    for fork in document["forks"]:
        at = text.index(fork["question"], at)
        assert fork["number"].split(" (")[0] in " ".join(text[at:].replace("│", " ").split())
    # Deeper forks stand further to the right.
    lines = text.splitlines()
    columns = [
        next(line.index(fork["question"]) for line in lines if fork["question"] in line)
        for fork in document["forks"][:4]
    ]
    assert columns == sorted(set(columns))
    assert "Why not the others" not in text
    assert "Plan: strategy='dp'" in text


def test_explain_says_why_each_other_lost() -> None:
    document = make_plan(resnet50()).to_document()
    text = " ".join(printed(document, explain=True).split())
    for row in document["predictions"]:
        assert row["why_not"] in text


def test_candidates_that_cannot_be_told_have_no_figure() -> None:
    document = make_plan(resnet50(simulated=True)).to_document()
    row = next(line for line in printed(document).splitlines() if line.strip().startswith("ddp "))
    assert "–" in row


@pytest.mark.parametrize("facts", [cifar(), giant(), resnet50(simulated=True)], ids=["cifar", "giant", "simulated"])
def test_the_page_holds_the_tree_and_needs_nothing_beside_it(facts: Any, tmp_path: Path) -> None:
    document = make_plan(facts).to_document()
    write_plan_page(document, tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    for fork in document["forks"]:
        assert fork["number"].replace("'", "&#39;") in page
    assert page.count('class="branch taken"') == len(document["forks"])
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "<script" not in page


def test_names_are_text_and_never_markup() -> None:
    from dataclasses import replace

    facts = resnet50()
    facts = replace(facts, model=replace(facts.model, name="<b>net</b>"))
    assert "<b>net" not in plan_page(make_plan(facts).to_document())
