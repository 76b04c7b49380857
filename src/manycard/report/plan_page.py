"""A plan as one HTML file that needs nothing beside it: the decision tree, the candidates, and what wasn't measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manycard.report import figures
from manycard.report.html import environment

__all__ = ["plan_page", "write_plan_page"]


def write_plan_page(document: Mapping[str, Any], path: Path) -> None:
    """Write the page of a plan to `path`.

    Raises:
        MissingExtraError: jinja2 is not installed; nothing was written.
    """
    path.write_text(plan_page(document), encoding="utf-8")


def plan_page(document: Mapping[str, Any]) -> str:
    """The page as text.

    Args:
        document: what ``manycard plan --json`` prints.

    Raises:
        MissingExtraError: jinja2 is not installed.
    """
    made = environment()
    made.filters.update(speed=figures.speed, memory=figures.memory)
    known = [row["step_ms"] for row in document["predictions"] if row["step_ms"] is not None]
    page: str = made.get_template("plan.html").render(document=document, slowest=max(known, default=1.0))
    return page
