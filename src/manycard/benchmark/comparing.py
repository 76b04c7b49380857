"""What has changed between two runs, row by row, beyond noise.

Behaviour:
    * Rows are the same row when workload, strategy, card count, precision, batch and settings are. A row that only one
      run has is listed as ``gone`` or ``new``.
    * Speed has changed when it differs by more than both rows' noise together (the root of the sum of squares), and by
      at least `TOLERANCE`: two runs of the same work differ by that without any cause.
    * A row that worked and fails now is ``fails``; the opposite is ``works``. Slower and failing rows count as worse.
    * Results of other cards or versions can be compared, and that they differ is said.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manycard.errors import SettingError

__all__ = ["TOLERANCE", "compare", "read_results"]

TOLERANCE = 0.02
"""The smallest relative change of speed that counts."""

Row = Mapping[str, Any]


def read_results(path: Path) -> dict[str, Any]:
    """The results of an earlier run: a ``bench.json``, or the folder that holds it.

    Raises:
        SettingError: there is no such file, or it holds no results.
    """
    file = path / "bench.json" if path.is_dir() else path
    fix = "give a bench.json, or the folder of an earlier manycard bench"
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError("--against", str(path), f"it can't be read ({error.strerror})", fix=fix) from error
    except ValueError as error:
        raise SettingError("--against", str(path), "it is no JSON document", fix=fix) from error
    if not isinstance(document, dict) or not isinstance(document.get("rows"), list):
        raise SettingError("--against", str(path), "it holds no rows", fix=fix)
    return document


def compare(document: Mapping[str, Any], earlier: Mapping[str, Any], against: str = "") -> dict[str, Any]:
    """What has changed from `earlier` to `document`.

    Args:
        document: results, as ``manycard bench --json`` prints them.
        earlier: those of an earlier run.
        against: where the earlier ones are from.

    Returns:
        ``{"against": ..., "rows": [...], "notes": [...], "worse": number, "compared": number}``, the last the rows that
        both have; a row has ``row`` (its name), ``verdict``
        (``slower``, ``faster``, ``same``, ``fails``, ``works``, ``new``, ``gone``), ``before`` and ``now`` (samples/s),
        ``change`` (relative), ``noise`` and ``memory_change`` (relative, of the fullest card).
    """
    before = {_key(row): row for row in earlier["rows"]}
    now = {_key(row): row for row in document["rows"]}
    rows = [_compared(row, before.get(key)) for key, row in now.items()]
    rows += [
        {**_blank(row), "verdict": "gone", "before": row["samples_per_s"]}
        for key, row in before.items()
        if key not in now
    ]
    notes = _differences(document, earlier)
    compared = len(before.keys() & now.keys())
    if not compared:
        notes.append("No row ran with the same settings in both: nothing was compared.")
    worse = sum(row["verdict"] in ("slower", "fails") for row in rows)
    return {"against": against, "rows": rows, "notes": notes, "worse": worse, "compared": compared}


def _key(row: Row) -> str:
    names = ("workload", "strategy", "cards", "precision", "scaling", "step")
    # A script's batch is known once it has run; a row that failed has none.
    settings = row.get("settings") or {}
    return json.dumps([[row.get(name) for name in names], row.get("per_card_batch"), settings], sort_keys=True)


def _blank(row: Row) -> dict[str, Any]:
    return {
        "row": row_name(row),
        "verdict": "new",
        "before": None,
        "now": None,
        "change": None,
        "noise": None,
        "memory_change": None,
    }


def row_name(row: Row) -> str:
    """A row in words: ``resnet50 dp on 2, precision=bf16``."""
    settings = "".join(
        f", {name}={'on' if value is True else 'off' if value is False else value}"
        for name, value in (row.get("settings") or {}).items()
    )
    what = row.get("step") or row["strategy"]
    return f"{row['workload']} {what} on {row['cards']}{settings}"


def _compared(row: Row, earlier: Row | None) -> dict[str, Any]:
    found = {**_blank(row), "now": row["samples_per_s"]}
    if earlier is None:
        return found
    found["before"] = earlier["samples_per_s"]
    if row["samples_per_s"] is None or earlier["samples_per_s"] is None:
        worked, works = earlier["samples_per_s"] is not None, row["samples_per_s"] is not None
        return {**found, "verdict": "same" if worked == works else "works" if works else "fails"}
    change = row["samples_per_s"] / earlier["samples_per_s"] - 1
    noise = max(TOLERANCE, math.hypot(row.get("noise") or 0.0, earlier.get("noise") or 0.0))
    verdict = "slower" if change < -noise else "faster" if change > noise else "same"
    fullest = [max((peak for peak in each["peak_memory_mib"] if peak), default=None) for each in (row, earlier)]
    memory = fullest[0] / fullest[1] - 1 if fullest[0] and fullest[1] else None
    return {**found, "verdict": verdict, "change": change, "noise": noise, "memory_change": memory}


def _differences(document: Mapping[str, Any], earlier: Mapping[str, Any]) -> list[str]:
    """Why the two may differ by more than the code."""
    notes = []
    new, old = document.get("machine", {}), earlier.get("machine", {})
    models = [[card.get("model") for card in machine.get("cards", [])] for machine in (new, old)]
    if set(models[0]) != set(models[1]):
        notes.append(f"Other cards: {', '.join(map(str, models[1]))} before, {', '.join(map(str, models[0]))} now.")
    notes += [
        f"{what}: {old.get(name)} before, {new.get(name)} now."
        for name, what in (("torch", "torch"), ("cuda", "CUDA"), ("manycard", "manycard"), ("cpu_cores", "CPU cores"))
        if new.get(name) != old.get(name)
    ]
    if "simulated" in models[0] or "simulated" in models[1]:
        notes.append("Simulated cards: changes of speed say nothing of real ones.")
    return notes
