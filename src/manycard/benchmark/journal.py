"""Rounds of rows as they are measured, a line each, so that a run can be ended at any time and taken up again.

Behaviour:
    * A line is written when its row's round has ended, and never changed. A half-written last line is left out.
    * `resume` gives what is there for a row that is the same in every setting. A row that failed has failed: it isn't
      tried again.
    * Results of other cards are refused: rounds of two machines are no rounds of one row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manycard.benchmark.isolated import Spec
from manycard.benchmark.measurement import Measurement
from manycard.cards import Card
from manycard.errors import SettingError

__all__ = ["Journal"]


class Journal:
    """The rounds that a run has measured.

    Args:
        path: the file; None keeps them in memory only.
        cards: the run's cards.
        resume: take up what the file holds; else it is begun anew.

    Raises:
        SettingError: the file is of other cards.
    """

    def __init__(self, path: Path | None = None, cards: Sequence[Card] = (), *, resume: bool = False) -> None:
        self._path = path
        self._found: dict[str, list[Measurement]] = {}
        models = [card.model for card in cards]
        if resume and path is not None and path.exists():
            self._read(path, models)
        elif path is not None:
            path.write_text(json.dumps({"cards": models}) + "\n", encoding="utf-8")

    def _read(self, path: Path, models: list[str]) -> None:
        lines = path.read_text(encoding="utf-8").split("\n")
        whole = "\n".join(lines[:-1])
        path.write_text(whole + "\n" if whole else json.dumps({"cards": models}) + "\n", encoding="utf-8")
        for number, line in enumerate(lines[:-1]):
            try:
                document: dict[str, Any] = json.loads(line)
            except ValueError:
                raise SettingError(
                    "--resume", str(path), f"line {number + 1} is no JSON", fix="leave --resume out to begin anew"
                ) from None
            if number == 0:
                if document.get("cards") != models:
                    raise SettingError(
                        "--resume",
                        str(path),
                        f"it holds results of {_in_words(document.get('cards') or [])}, and the cards are "
                        f"{_in_words(models)}",
                        fix="give the same --cards, or another folder",
                    )
                continue
            self._found.setdefault(document["spec"], []).append(Measurement.from_row(document["row"]))

    def rounds(self, spec: Spec) -> list[Measurement]:
        """What was measured of a row."""
        return self._found.get(spec.to_json(), [])

    def add(self, spec: Spec, row: Measurement) -> None:
        """Keep one round of a row."""
        key = spec.to_json()
        self._found.setdefault(key, []).append(row)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"spec": key, "row": row.to_row()}) + "\n")


def _in_words(models: Sequence[str]) -> str:
    """Cards by model: ``2 x NVIDIA H200``."""
    return ", ".join(f"{models.count(model)} x {model}" for model in dict.fromkeys(models)) or "no cards"
