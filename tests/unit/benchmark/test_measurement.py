"""Figures of a row: balance, differences, medians, comparison with single."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from manycard.benchmark.measurement import (
    Measurement,
    balance_of,
    compare_with_single,
    finite,
    largest_difference,
    median_of,
)

ROW = Measurement(
    workload="mlp",
    unit="samples",
    strategy="dp",
    cards=2,
    card_names=("cuda:0", "cuda:1"),
    simulated=False,
    scaling="weak",
    batch=512,
    per_card_batch=256,
    precision="bf16",
    samples_per_s=1000.0,
    step_ms=512.0,
    peak_memory_mib=(100.0, 50.0),
    losses=(2.0, 1.0),
    final_loss=1.0,
    repeats=1,
)


def test_a_row_comes_back_from_json_as_it_went() -> None:
    assert Measurement.from_row(json.loads(json.dumps(ROW.to_row()))) == ROW


def test_a_row_has_the_promised_keys() -> None:
    promised = {
        *("strategy", "cards", "card_names", "scaling", "batch", "per_card_batch", "precision", "samples_per_s"),
        *("step_ms", "speedup", "efficiency", "peak_memory_mib", "balance", "losses", "final_loss", "accuracy"),
        *("largest_loss_difference", "error", "workload"),
    }
    assert promised <= set(ROW.to_row())


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [
        ([80.0], 1.0),
        ([100.0, 50.0], 0.75),
        ([10.0, 10.0, 10.0, 50.0], 0.4),
        ([100.0, None], None),
        ([], None),
        ([0.0], None),
    ],
)
def test_balance_is_mean_over_largest(peaks: list[float | None], expected: float | None) -> None:
    assert balance_of(peaks) == expected


def test_the_largest_difference_is_relative_and_over_common_steps() -> None:
    assert largest_difference([1.0, 3.0, 9.0], [1.0, 2.0]) == 0.5
    assert largest_difference([], [1.0]) is None
    assert largest_difference([None], [1.0]) is None, "a loss that was not finite must not count as equal"


def test_medians_are_taken_over_rounds() -> None:
    rounds = [replace(ROW, samples_per_s=s, step_ms=1 / s, peak_memory_mib=(s, 100.0)) for s in (10.0, 30.0, 20.0)]
    row = median_of(rounds)
    assert (row.samples_per_s, row.step_ms, row.peak_memory_mib) == (20.0, 1 / 20.0, (20.0, 100.0))
    assert row.balance == 0.6
    assert row.repeats == 3


def test_a_failed_round_keeps_its_error_beside_the_figures_of_the_others() -> None:
    failed = replace(ROW, samples_per_s=None, error="out of memory: no", trace="Traceback")
    assert median_of([ROW, failed]).samples_per_s == 1000.0
    assert (median_of([ROW, failed]).error, median_of([ROW, failed]).trace) == ("out of memory: no", "Traceback")
    assert median_of([failed]).samples_per_s is None


def test_speed_up_and_efficiency_come_from_the_single_row_of_the_same_workload() -> None:
    single = replace(ROW, strategy="single", cards=1, samples_per_s=800.0, batch=256)
    other = replace(ROW, strategy="single", cards=1, samples_per_s=1.0, workload="gpt2")
    compared = compare_with_single([other, single, ROW])[2]
    assert compared.speedup == 1.25
    assert compared.efficiency == 0.625
    assert compared.largest_loss_difference is None, "global batches differ, so losses can't be compared"


def test_losses_are_compared_where_the_global_batch_is_the_same() -> None:
    single = replace(ROW, strategy="single", cards=1, losses=(2.0, 0.8))
    assert compare_with_single([single, ROW])[1].largest_loss_difference == pytest.approx(0.25)


def test_without_a_single_row_that_worked_there_is_no_speed_up() -> None:
    failed = replace(ROW, strategy="single", samples_per_s=None, error="no")
    assert compare_with_single([failed, ROW])[1].speedup is None
    assert compare_with_single([ROW])[0].efficiency is None


def test_what_json_cannot_say_is_none() -> None:
    assert [finite(value) for value in (1.5, float("nan"), float("inf"))] == [1.5, None, None]
