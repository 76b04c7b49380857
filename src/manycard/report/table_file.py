"""Rows of a benchmark as CSV, for spreadsheets and data frames: every figure as it was measured. Decides nothing.

Lists (one figure a card) are joined by semicolons; each setting has a column ``set_NAME``, and pipelines have theirs of
bubble and busy times. Losses, findings, tracebacks and the passes of a pipeline are in the JSON only.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from manycard.report.columns import setting_names

__all__ = ["rows_as_csv"]

_LEFT_OUT = ("losses", "trace", "settings", "findings", "timeline")
_OF_TIMELINE = ("bubble", "expected_bubble", "scheduled_bubble", "balance", "busy_seconds")
"""What a pipeline's row has beside, as ``pipeline_NAME``."""


def rows_as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as CSV text, with a line of headings; empty where there are no rows."""
    settings = setting_names(rows)
    keys = list(dict.fromkeys(key for row in rows for key in row if key not in _LEFT_OUT))
    with io.StringIO(newline="") as text:
        writer = csv.writer(text, lineterminator="\n")
        timed = _OF_TIMELINE if any(row.get("timeline") for row in rows) else ()
        if rows:
            writer.writerow([*keys, *(f"set_{name}" for name in settings), *(f"pipeline_{name}" for name in timed)])
        for row in rows:
            own, found = row.get("settings") or {}, row.get("timeline") or {}
            values = [*map(row.get, keys), *map(own.get, settings), *map(found.get, timed)]
            writer.writerow([_cell(value) for value in values])
        return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return ";".join("" if each is None else str(each) for each in value)
    return "" if value is None else value
