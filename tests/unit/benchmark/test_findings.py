"""What holds rows back: a planted cause is named in an inefficient row's findings, and efficient rows have none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manycard.benchmark import MatrixSettings, Measurement, run_matrix
from manycard.benchmark.findings import add_links, add_pipelines, expect
from manycard.benchmark.isolated import run_row
from manycard.benchmark.matrix import matrix_rows
from manycard.benchmark.measurement import compare_with_single, median_of
from manycard.benchmark.profiled import Expected
from manycard.cards import choose_cards
from manycard.diagnosis import Finding
from manycard.errors import CardsError
from manycard.launch import Script
from tests.unit.benchmark.test_journal import Silent

SCRIPT = """
import sys, time, torch
from torch import nn
import manycard as mc

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        time.sleep(float(sys.argv[1]))
        return torch.ones(32)

net = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
parallel = mc.Parallel("dp", cards="all", seed=0)
model, optimizer = parallel.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
step = parallel.train_step(lambda model, x: model(x).square().mean(), model, optimizer)
for epoch in range(int(sys.argv[3])):
    for x in parallel.loader(Samples(), batch_size=8):
        step(x)
        time.sleep(float(sys.argv[2]))
parallel.close()
"""


def settings(folder: Path, *arguments: str, strategies: tuple[str, ...] = ("single", "dp")) -> MatrixSettings:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    return MatrixSettings(
        workloads=(),
        cards=choose_cards("cpu:2").cards,
        strategies=strategies,
        script=Script(str(script), arguments),
        per_card_batch=8,
        steps=5,
    )


def test_a_loader_that_holds_rows_back_is_their_first_finding(tmp_path: Path) -> None:
    rows = run_matrix(settings(tmp_path, "0.01", "0", "100"), Silent())["rows"]
    assert [row["error"] for row in rows] == [None] * 2
    single, row = rows
    assert single["findings"] is None
    assert row["efficiency"] < 0.7, row
    first = row["findings"][0]
    assert (first["cause"], first["part"]) == ("the cards wait for data", "input")
    assert "num_workers='auto' in parallel.loader" in first["fix"]
    assert first["gain"] > 1.3
    gains = [each["gain"] for each in row["findings"]]
    assert gains == sorted(gains, reverse=True)


def test_ranks_look_together_and_rank_0_tells_what_all_have_found(tmp_path: Path) -> None:
    (spec,) = matrix_rows(settings(tmp_path, "0", "0.1", "100", strategies=("ddp",)))
    row = run_row(spec, expected=Expected(1e9, 2).as_dict())
    assert row.error is None, row.trace
    assert row.findings
    assert row.findings[0]["cause"].startswith("the script's own code between and around the steps takes long")


def test_rows_that_are_efficient_train_no_step_more_and_say_nothing(tmp_path: Path) -> None:
    (spec,) = matrix_rows(settings(tmp_path, "0", "0.1", "100", strategies=("dp",)))
    row = run_row(spec, expected=Expected(85.0, 2).as_dict())
    assert row.error is None, row.trace
    assert (row.samples_per_s or 0) < 170, "16 samples in 0.1 s at most"
    assert row.findings is not None, "it was looked into"
    row = run_row(spec, expected=Expected(1.0, 2).as_dict())
    assert (row.samples_per_s or 0) > 2
    assert row.findings is None


def test_a_script_that_ends_while_it_is_looked_into_keeps_its_row(tmp_path: Path) -> None:
    made = settings(tmp_path, "0", "0", "1", strategies=("dp",))  # 63 steps
    (spec,) = matrix_rows(replace(made, steps=50))
    row = run_row(spec, expected=Expected(1e9, 2).as_dict())
    assert row.error is None, row.trace
    assert row.samples_per_s is not None


def measurement(strategy: str, cards: int, speed: float | None, **more: Any) -> Measurement:
    names = tuple(f"cuda:{index}" for index in range(cards))
    return Measurement(
        "mlp", "samples", strategy, cards, names, False, "weak", 8 * cards, 8, "default", samples_per_s=speed, **more
    )


def test_a_row_is_expected_to_do_what_its_single_row_did() -> None:
    (single, spec) = matrix_rows(
        MatrixSettings(workloads=("mlp",), cards=choose_cards("cpu:2").cards, strategies=("single", "dp"))
    )
    rows = [replace(measurement("single", 1, 100.0), precision=spec.precision)]
    found = expect(spec, rows, [measurement("dp", 2, 190.0), measurement("dp", 2, None)])
    assert found == Expected(100.0, 2, (190.0,))
    assert Expected.of(found.as_dict()) == found
    assert expect(single, rows, []) is None, "one card alone is not compared with itself"
    assert expect(spec, [measurement("dp", 2, 100.0)], []) is None, "there is no single row"


@pytest.mark.parametrize(("speed", "missed"), [(179.0, True), (180.0, False), (None, False)])
def test_a_row_is_looked_into_under_an_efficiency_of_0_9(speed: float | None, missed: bool) -> None:
    assert Expected(100.0, 2).is_missed(speed) == missed


def test_the_median_of_rounds_decides_and_not_the_last_one() -> None:
    assert not Expected(100.0, 2, (185.0, 190.0)).is_missed(100.0)
    assert Expected(100.0, 2, (100.0, 110.0)).is_missed(195.0)


FOUND = {"cause": "a", "evidence": "b", "fix": "c", "severity": "warning", "gain": 1.3, "part": "reduce"}


def test_findings_of_the_last_round_stay_with_a_row_that_is_inefficient_in_the_end() -> None:
    rounds = [measurement("dp", 2, 120.0), measurement("dp", 2, 130.0, findings=(FOUND,))]
    slow = compare_with_single([measurement("single", 1, 100.0), median_of(rounds)])[1]
    assert slow.findings == (FOUND,)
    assert Measurement.from_row(slow.to_row()) == slow
    fast = compare_with_single([measurement("single", 1, 65.0), median_of(rounds)])[1]
    assert fast.efficiency == pytest.approx(125 / 130)
    assert fast.findings is None


LINK = Finding("some cards can't read each other's memory (P2P)", "cuda:0-cuda:1", "boot with iommu=pt", "warning")


def test_links_are_measured_once_where_rows_lose_time_between_cards() -> None:
    looked: list[int] = []
    said: list[str] = []

    def look() -> list[Finding]:
        looked.append(1)
        return [LINK]

    larger = {**FOUND, "gain": 1.5, "part": "input"}
    rows = [{**measurement("dp", 2, 1.0, findings=(larger, FOUND)).to_row()} for _ in range(2)]
    add_links(rows, look, said.append)
    assert (len(looked), len(said)) == (1, 1)
    for row in rows:
        assert [each["cause"] for each in row["findings"]] == ["a", "a", LINK.cause]
        assert (row["findings"][2]["gain"], row["findings"][2]["part"]) == (1.3, "links")


@pytest.mark.parametrize(
    "changed", [{"findings": None}, {"findings": [{**FOUND, "part": "input"}]}, {"simulated": True}]
)
def test_links_are_left_alone_where_no_real_row_loses_time_between_cards(changed: dict[str, Any]) -> None:
    row = {**measurement("dp", 2, 1.0, findings=(FOUND,)).to_row(), **changed}
    before = dict(row)
    add_links([row], lambda: pytest.fail("links were measured"), lambda _: None)
    assert row == before


def test_links_that_can_not_be_measured_leave_the_rows_as_they_are() -> None:
    def fails() -> list[Finding]:
        raise CardsError("--cards", "0,1", "they are gone", fix="look")

    said: list[str] = []
    row = measurement("dp", 2, 1.0, findings=(FOUND,)).to_row()
    add_links([row], fails, said.append)
    assert row["findings"] == [FOUND]
    assert said[1].startswith("the links could not be measured: ")


def timeline(bubble: float, balance: float) -> dict[str, Any]:
    return {"bubble": bubble, "balance": balance, "busy_seconds": [0.02, 0.02 * balance], "micro_batches": 8}


def test_a_pipeline_that_waits_or_is_uneven_says_so() -> None:
    def causes(efficiency: float, bubble: float, balance: float) -> list[str] | None:
        row = measurement("pipeline", 2, 1.0, efficiency=efficiency, timeline=timeline(bubble, balance))
        (found,) = add_pipelines([row])
        return None if found.findings is None else [each["cause"] for each in found.findings]

    assert causes(0.95, 0.4, 0.6) is None
    assert causes(0.8, 0.02, 0.99) == []
    (uneven,) = causes(0.6, 0.41, 0.6) or []
    assert uneven.startswith("the stages of the pipeline take unequal time")
    (waiting,) = causes(0.6, 0.4, 0.99) or []
    assert waiting.startswith("the cards of the pipeline wait for their first")
