"""Rounds are kept as they are done, and taken up again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from manycard.benchmark import Journal, MatrixSettings, Measurement, run_matrix
from manycard.benchmark.matrix import matrix_rows
from manycard.benchmark.row import RowSpec
from manycard.cards import Card, choose_cards
from manycard.errors import SettingError

CARDS = choose_cards("cpu:2").cards


class Silent:
    def __init__(self) -> None:
        self.labels: list[str] = []

    def started(self, label: str, round_number: int, rounds: int) -> None:
        self.labels.append(f"{label} {round_number}")

    def progressed(self, done: int, total: int) -> None:
        pass

    def finished(self, row: dict[str, Any], document: dict[str, Any]) -> None:
        pass


def settings(**changed: Any) -> MatrixSettings:
    return MatrixSettings(**{"workloads": ("mlp",), "cards": CARDS, "strategies": ("single", "dp"), **changed})


def made_up(spec: RowSpec, on_progress: Callable[[int, int], None], time_limit: float, *more: object) -> Measurement:
    if spec.strategy == "dp":
        return spec.measurement(error="out of memory: no")
    return spec.measurement(samples_per_s=1000.0, spread=(990.0, 1010.0), losses=(1.0,), final_loss=1.0, repeats=1)


def test_rows_that_are_there_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manycard.benchmark.rounds.run_row", made_up)
    file = tmp_path / "rounds.jsonl"
    whole = run_matrix(settings(), Silent(), Journal(file, CARDS))
    again = Silent()
    resumed = run_matrix(settings(repeats=2), again, Journal(file, CARDS, resume=True))
    assert again.labels == ["mlp single on 1 card 2"], "a row that failed has failed"
    assert [row["repeats"] for row in resumed["rows"]] == [2, 0]
    assert resumed["rows"][1]["error"] == whole["rows"][1]["error"] == "out of memory: no"
    other = Silent()
    run_matrix(settings(seed=1), other, Journal(file, CARDS, resume=True))
    assert len(other.labels) == 2, "another seed is another row"


def test_without_resume_the_file_is_begun_anew(tmp_path: Path) -> None:
    file = tmp_path / "rounds.jsonl"
    (spec, _) = matrix_rows(settings())
    Journal(file, CARDS).add(spec, spec.measurement(samples_per_s=1.0))
    assert len(Journal(file, CARDS, resume=True).rounds(spec)) == 1
    assert Journal(file, CARDS).rounds(spec) == []
    assert Journal(file, CARDS, resume=True).rounds(spec) == []


def test_half_a_line_is_left_out_and_the_next_one_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "rounds.jsonl"
    first, second = matrix_rows(settings())
    Journal(file, CARDS).add(first, first.measurement(samples_per_s=1.0))
    with file.open("a") as half:
        half.write('{"spec": "killed while writ')
    resumed = Journal(file, CARDS, resume=True)
    resumed.add(second, second.measurement(samples_per_s=2.0))
    found = Journal(file, CARDS, resume=True)
    assert [found.rounds(spec)[0].samples_per_s for spec in (first, second)] == [1.0, 2.0]


def test_a_file_that_something_else_wrote_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rounds.jsonl"
    file.write_text("no json\n")
    with pytest.raises(SettingError, match="line 1 is no JSON"):
        Journal(file, CARDS, resume=True)


def test_results_of_other_cards_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "rounds.jsonl"
    Journal(file, CARDS)
    with pytest.raises(SettingError, match="--resume"):
        Journal(file, [Card(0, torch.device("cuda", 0), "NVIDIA H200", "GPU-0")], resume=True)
