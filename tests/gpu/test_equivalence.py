"""Every strategy trains as plain PyTorch does on one card: on real cards, in fp32, to 1e-4.

Card counts are all that the machine has, from 1. Ranks start once for each count and run everything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import manycard as mc
from tests.strategies.cases import CASES
from tests.strategies.conftest import WORKER
from tests.strategies.reference import Outcome, train_in_groups, train_in_loop
from tests.strategies.runs import RUNS

COUNTS = list(range(1, torch.cuda.device_count() + 1)) or [1]
BY_NAME = {case.name: case for case in CASES}
REFERENCES = {"step": train_in_groups, "loop": train_in_loop}
TRAINED = [("step", case.name) for case in CASES] + [("loop", case.name) for case in CASES if case.in_explicit_loop]
ORIGINAL = ["sgd_momentum", "adamw", "accumulate_adamw_clip_schedule", "uneven_last_batch", "tied", "dict_batches"]
"""Cases that `torch_dp` can do."""
OTHERS = [
    *[f"converge/{precision}/{mode}" for precision in ("bf16", "fp16") for mode in ("step", "loop")],
    *[f"clipped/{precision}/0.05/{mode}" for precision in ("bf16", "fp16") for mode in ("step", "loop")],
    *["overflow/1", "overflow/2", "resume", "draws", "evaluate/25/8/True", "evaluate/1/4/False"],
]
Get = Callable[[str, int, str], list[Any]]


@cache
def reference(mode: str, name: str) -> Outcome:
    """One card's training, once for all strategies."""
    return REFERENCES[mode](BY_NAME[name], torch.float32, "cuda:0")


@pytest.fixture(scope="session")
def gpu_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """What each rank of `ddp` got from every run."""

    @cache
    def results(count: int) -> list[dict[str, Any]]:
        from manycard.cards import choose_cards
        from manycard.launch import launch_script

        folder = tmp_path_factory.mktemp(f"ranks{count}")
        names = [f"{mode}/{name}/torch.float32" for mode, name in TRAINED] + OTHERS
        launch_script([str(WORKER), str(folder), "ddp", str(count), *names], choose_cards(count).cards)
        return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(count)]

    return results


@pytest.fixture
def get(gpu_ranks: Callable[[int], list[dict[str, Any]]], tmp_path: Path) -> Get:
    """What a run gave back under a strategy, by rank."""

    def result(strategy: str, cards: int, name: str) -> list[Any]:
        if strategy != "ddp":
            return [RUNS[name](partial(mc.Parallel, strategy, cards=cards), tmp_path)]
        by_rank = [results[name] for results in gpu_ranks(cards)]
        for rank, value in enumerate(by_rank):
            assert not isinstance(value, str), f"rank {rank} of {cards}:\n{value}"
        return by_rank

    return result


ON = [("single", 1), *(("dp", count) for count in COUNTS), *(("ddp", count) for count in COUNTS)]


def same(actual: Outcome, expected: Outcome) -> None:
    """Losses, parameters, buffers and optimizer states to 1e-4."""
    torch.testing.assert_close(actual.losses, expected.losses, rtol=1e-4, atol=1e-4)
    assert actual.tensors.keys() == expected.tensors.keys()
    for key, tensor in expected.tensors.items():
        close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4, msg=lambda m, k=key: f"{k}: {m}")
        close(actual.tensors[key], tensor)
    assert actual.without_grad == expected.without_grad
    assert actual.learning_rates == pytest.approx(expected.learning_rates, rel=1e-9)


@pytest.mark.parametrize(("strategy", "cards"), ON)
@pytest.mark.parametrize(("mode", "name"), TRAINED)
def test_training_is_that_of_one_card(get: Get, strategy: str, cards: int, mode: str, name: str) -> None:
    for actual in get(strategy, cards, f"{mode}/{name}/torch.float32"):
        same(actual, reference(mode, name))


@pytest.mark.parametrize("cards", COUNTS)
@pytest.mark.parametrize("name", ORIGINAL)
def test_the_baseline_trains_as_one_card(get: Get, cards: int, name: str) -> None:
    for actual in get("torch_dp", cards, f"step/{name}/torch.float32"):
        same(actual, reference("step", name))


@pytest.mark.parametrize(("strategy", "cards"), ON)
@pytest.mark.parametrize("mode", ["step", "loop"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_converges(get: Get, strategy: str, cards: int, precision: str, mode: str) -> None:
    for result in get(strategy, cards, f"converge/{precision}/{mode}"):
        assert sum(result["losses"][-3:]) < 0.2 * sum(result["losses"][:3])


@pytest.mark.parametrize(("strategy", "cards"), ON)
@pytest.mark.parametrize("mode", ["step", "loop"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_clips_unscaled_gradients(get: Get, strategy: str, cards: int, precision: str, mode: str) -> None:
    for length in get(strategy, cards, f"clipped/{precision}/0.05/{mode}"):
        assert length == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize(("strategy", "cards"), ON)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_overflow_skips_the_update_on_every_card(get: Get, strategy: str, cards: int, accumulate: int) -> None:
    for result in get(strategy, cards, f"overflow/{accumulate}"):
        assert result["changed"] == result["updated"]
        assert sum(result["updated"]) == 4
        assert not result["updated"][3 * accumulate - 1]
        assert result["optimizer steps"] == {4}
        assert result["rates"][-1] == pytest.approx(1e-2 * 0.5**4)
        assert result["finite"]


@pytest.mark.parametrize(("strategy", "cards"), ON)
def test_resumes_bit_for_bit(get: Get, strategy: str, cards: int) -> None:
    for result in get(strategy, cards, "resume"):
        assert result["parted"] == result["straight"]
        assert all(torch.equal(result["again"][name], tensor) for name, tensor in result["final"].items())


@pytest.mark.parametrize(("strategy", "cards"), ON)
@pytest.mark.parametrize(("samples", "name"), [(25, "evaluate/25/8/True"), (1, "evaluate/1/4/False")])
def test_metrics_use_every_sample_exactly_once(get: Get, strategy: str, cards: int, samples: int, name: str) -> None:
    for result in get(strategy, cards, name):
        for metrics in result["metrics"]:
            assert metrics["samples"] == samples
            assert metrics["mean"] == pytest.approx((samples + 1) / 2, rel=1e-12)


@pytest.mark.parametrize(("strategy", "cards"), ON)
def test_draws_differ_between_cards_and_repeat_from_a_seed(get: Get, strategy: str, cards: int) -> None:
    for result in get(strategy, cards, "draws"):
        first, again, other = result["masks"]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not torch.equal(first[0], first[1])
        assert not torch.equal(first[0], other[0])
        assert len({tuple(shard[0].tolist()) for shard in first[0].tensor_split(cards)}) == cards
