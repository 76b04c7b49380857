"""A plan as one HTML file that needs nothing beside it: the decision tree, the candidates, and what wasn't measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manycard.errors import MissingExtraError
from manycard.report import figures

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
    try:
        import jinja2
    except ImportError as error:
        raise MissingExtraError("jinja2", "report", "the HTML report") from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("manycard.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(speed=figures.speed, memory=figures.memory)
    known = [row["step_ms"] for row in document["predictions"] if row["step_ms"] is not None]
    return environment.get_template("plan.html").render(document=document, slowest=max(known, default=1.0))
