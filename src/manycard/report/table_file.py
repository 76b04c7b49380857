"""Rows of a benchmark as CSV, for spreadsheets and data frames: every figure as it was measured. Decides nothing.

Lists (one figure a card) are joined by semicolons; each setting has a column ``set_NAME``. Losses, findings and
tracebacks are in the JSON only.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from manycard.report.columns import setting_names

__all__ = ["rows_as_csv"]

_LEFT_OUT = ("losses", "trace", "settings", "findings")


def rows_as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as CSV text, with a line of headings; empty where there are no rows."""
    settings = setting_names(rows)
    keys = list(dict.fromkeys(key for row in rows for key in row if key not in _LEFT_OUT))
    with io.StringIO(newline="") as text:
        writer = csv.writer(text, lineterminator="\n")
        if rows:
            writer.writerow([*keys, *(f"set_{name}" for name in settings)])
        for row in rows:
            own = row.get("settings") or {}
            writer.writerow([*(_cell(row.get(key)) for key in keys), *(_cell(own.get(name)) for name in settings)])
        return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return ";".join("" if each is None else str(each) for each in value)
    return "" if value is None else value
