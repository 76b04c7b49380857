"""Traces as HolisticTraceAnalysis and others read them: one file a card, each with a rank of its own.

Such tools take a trace for one card's. Of a process that drives several cards they would add up kernels that ran at the
same time on different ones. So each card gets a file with all that the host did and what that card did.

Source: HolisticTraceAnalysis, ``hta/common/trace_file.py`` (a file's rank is read from ``distributedInfo``).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["RANK_KEY", "split_by_card"]

RANK_KEY = "distributedInfo"
"""Where a trace says which rank it is of."""


def split_by_card(trace: Path, folder: Path) -> list[Path]:
    """Write a trace a card; the files' paths, in order of cards. A trace without GPU events gives none.

    Args:
        trace: as `Recording` writes it, of one process.
        folder: where the files go; made where it isn't there.
    """
    with gzip.open(trace, "rt", encoding="utf-8", errors="replace") as file:
        document: dict[str, Any] = json.load(file)
    events = document.pop("traceEvents", [])
    cards = sorted({card for event in events if (card := _card_of(event)) is not None})
    folder.mkdir(parents=True, exist_ok=True)
    first = document.get(RANK_KEY, {}).get("rank", 0) if len(cards) < 2 else 0
    return [
        _write(
            folder / f"rank{first + place}.json.gz",
            {
                **document,
                RANK_KEY: {**document.get(RANK_KEY, {}), "rank": first + place},
                "traceEvents": [event for event in events if _card_of(event) in (None, card)],
            },
        )
        for place, card in enumerate(cards)
    ]


def _card_of(event: Mapping[str, Any]) -> int | None:
    """The card on which an event ran; None for the host's."""
    arguments = event.get("args", {})
    return arguments.get("device") if "stream" in arguments and "device" in arguments else None


def _write(path: Path, document: Mapping[str, Any]) -> Path:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(document, file)
    return path
