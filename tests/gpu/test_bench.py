"""The benchmark on real cards: figures that only they have, and settings that only they read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manycard.benchmark import MatrixSettings, read_axes, run_matrix
from manycard.benchmark.ablation import AblationSettings, run_ablation
from manycard.cards import choose_cards

COUNTS = [count for count in (1, 2, 4, 8) if count <= torch.cuda.device_count()]
SEVERAL = [count for count in COUNTS if count > 1][:1]


class Silent:
    """Hears what a run does, and keeps nothing."""

    def started(self, label: str, round_number: int, rounds: int) -> None:
        pass

    def progressed(self, done: int, total: int) -> None:
        pass

    def finished(self, row: dict[str, Any], document: dict[str, Any]) -> None:
        pass


@pytest.mark.timeout(400)
def test_memory_energy_and_graphs_are_measured() -> None:
    settings = MatrixSettings(
        ("mlp",),
        choose_cards(COUNTS[-1]).cards,
        ("single", "dp", "ddp"),
        counts=tuple(COUNTS),
        axes=read_axes(["graphs=on,off"]),
        precision="bf16",
    )
    rows = run_matrix(settings, Silent())["rows"]
    assert [row["error"] for row in rows] == [None] * len(rows)
    for row in rows:
        assert len(row["peak_memory_mib"]) == len(row["reserved_memory_mib"]) == row["cards"]
        held = zip(row["peak_memory_mib"], row["reserved_memory_mib"], strict=True)
        assert all(0 < peak <= reserved for peak, reserved in held)
        assert 0 < row["balance"] <= 1
        assert row["joules_per_sample"] is None or 0 < row["joules_per_sample"] < 10
        assert row["steady"]
    speeds = {(row["strategy"], row["cards"], row["settings"].get("graphs")): row["samples_per_s"] for row in rows}
    for count in COUNTS:
        assert speeds["dp", count, "on"] > speeds["dp", count, "off"], "graphs spare the host's launches"


@pytest.mark.timeout(200)
def test_running_out_of_memory_is_a_row() -> None:
    settings = MatrixSettings(("gpt2",), choose_cards(1).cards, ("single",), batch=100_000)
    (row,) = run_matrix(settings, Silent())["rows"]
    assert row["error"].startswith("out of memory: ")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("count", SEVERAL)
def test_an_ablation_begins_with_nn_data_parallel_on_all_its_cards(count: int) -> None:
    settings = AblationSettings(
        "resnet18-cifar",
        choose_cards(count).cards,
        only=("loss", "output", "precision", "nccl", "engine", "graphs"),
        steps=20,
    )
    document = run_ablation(settings, Silent())
    rows = {(row["part"], row["step"]): row for row in document["rows"]}
    assert [row["error"] for row in document["rows"]] == [None] * len(document["rows"])
    assert all(row["skipped"] is None for row in document["rows"])
    assert rows["together", "graphs"]["total"] > 1.5


@pytest.mark.timeout(400)
@pytest.mark.parametrize("count", SEVERAL)
def test_rows_that_scale_badly_say_why_and_rows_that_scale_say_nothing(count: int) -> None:
    settings = MatrixSettings(
        ("mlp",), choose_cards(count).cards, ("single", "dp"), counts=(count,), batch=64, steps=40, small=True
    )
    single, row = run_matrix(settings, Silent())["rows"]
    assert single["findings"] is None
    assert row["efficiency"] < 0.9
    assert row["findings"], row
    assert all(each["gain"] >= 1.05 and each["fix"] for each in row["findings"])
    large = MatrixSettings(
        ("resnet50",), choose_cards(count).cards, ("single", "dp"), counts=(count,), precision="bf16", steps=40
    )
    rows = run_matrix(large, Silent())["rows"]
    assert [each["findings"] for each in rows if (each["efficiency"] or 0) >= 0.9] == [None] * len(rows), rows
