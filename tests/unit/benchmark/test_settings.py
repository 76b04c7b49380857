"""Settings that can't work are refused before anything runs, in the words of the command line."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from manycard.benchmark import MatrixSettings
from manycard.benchmark.workloads import WORKLOADS
from manycard.cards import choose_cards
from manycard.errors import MissingExtraError, SettingError, StrategyError


def settings(**changed: Any) -> MatrixSettings:
    return MatrixSettings(**{"workloads": ("mlp",), "cards": choose_cards("cpu:3").cards, **changed})


@pytest.mark.parametrize(
    ("changed", "option"),
    [
        ({"workloads": ("mpl",)}, "--workload='mpl'"),
        ({"workloads": ()}, "--workload="),
        ({"strategies": ("dpd",)}, "--strategies='dpd'"),
        ({"strategies": ()}, "--strategies="),
        ({"axes": (("replicas", (2,)),)}, "--set='replicas': only pipelines read it"),
        ({"axes": (("replicas", (2,)),), "strategies": ("pipeline",)}, "--set='replicas=2': 3 cards can't be"),
        ({"strategies": ("torch_dp",)}, "--strategies='torch_dp'"),
        ({"counts": (0,)}, "--counts=0"),
        ({"counts": (2, 4)}, "--counts=4"),
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"batch": 8, "per_card_batch": 4}, "--per-card-batch=4"),
        ({"batch": 2}, "--batch=2"),
        ({"batch": 0}, "--batch=0"),
        ({"steps": 0}, "--steps=0"),
        ({"repeats": 0}, "--repeats=0"),
        ({"seed": -1}, "--seed=-1"),
        ({"epochs": 3}, "--epochs=3"),
        ({"workloads": ("digits",), "steps": 3}, "--steps=3"),
        ({"channels_last": False}, "--no-channels-last"),
    ],
)
def test_a_value_that_cannot_work_is_named_with_its_fix(changed: dict[str, Any], option: str) -> None:
    with pytest.raises(SettingError) as caught:
        settings(**changed)
    assert str(caught.value).startswith(option)
    assert caught.value.fix


def test_an_unknown_strategy_is_a_strategy_error_that_lists_the_known() -> None:
    with pytest.raises(StrategyError, match="single"):
        settings(strategies=("nope",))


def test_a_missing_package_is_said_before_any_row_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"manycard\[demo\]"):
        settings(workloads=("digits",))


def test_batches_follow_the_kind_of_scaling() -> None:
    mlp = WORKLOADS["mlp"]
    strong, weak, default = settings(batch=12), settings(per_card_batch=5), settings(small=True)
    assert (strong.scaling_of(mlp), strong.batch_of(mlp, 1), strong.batch_of(mlp, 3)) == ("strong", 12, 12)
    assert (weak.scaling_of(mlp), weak.batch_of(mlp, 1), weak.batch_of(mlp, 3)) == ("weak", 5, 15)
    assert (default.scaling_of(mlp), default.batch_of(mlp, 2)) == ("weak", 2 * mlp.small_per_card_batch)


def test_steps_and_epochs_each_reach_the_workloads_they_are_for() -> None:
    both = settings(workloads=("mlp", "digits"), steps=7, epochs=2)
    assert [both.length_of(WORKLOADS[name]) for name in ("mlp", "digits")] == ["7 steady steps", "2 epochs"]
    assert [both.epochs_of(WORKLOADS[name]) for name in ("mlp", "digits")] == [None, 2]


def test_repeated_names_and_counts_count_once() -> None:
    once = settings(workloads=("mlp", "mlp"), strategies=("dp", "single", "dp"), counts=(2, 1, 2))
    assert (len(once.kinds), once.strategies, once.counts) == (1, ("dp", "single"), (1, 2))


def test_without_counts_all_cards_are_used() -> None:
    assert settings().counts == (3,)
