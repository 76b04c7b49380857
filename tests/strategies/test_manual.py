"""Strategy `manual` trains as plain PyTorch does on one card, whatever share each card gets.

The cases, references and tolerances are those of the other strategies (`test_equivalence`), by weights and by splits of
the script's own.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import manycard as mc

from .cases import mse
from .reference import Outcome
from .runs import RUNS
from .test_equivalence import BY_NAME, reference
from .test_equivalence import RUNS as TRAINED

WEIGHTS = [[1, 1], [3, 1], [5, 2, 1], [1, 4, 2, 3]]
TINY = [1, 30]
"""The first card's share is less than a sample of every batch; it gets one all the same."""
FEW = [
    "accumulate_adamw_clip_schedule",
    "last_batch_smaller_than_cards",
    "one_sample_in_all",
    "sometimes_unused_accumulated",
    "sync_batchnorm_few",
    "token_sums_few",
    "tied",
    "sparse_embedding",
]
"""Cases in which a card without samples, or with other samples than even shares give it, shows."""


def take(batch: Any, rows: torch.Tensor) -> Any:
    """Some rows of every tensor of a batch."""
    if isinstance(batch, torch.Tensor):
        return batch[rows]
    if isinstance(batch, dict):
        return {key: take(part, rows) for key, part in batch.items()}
    return type(batch)(take(part, rows) for part in batch)


def first_tensor(batch: Any) -> torch.Tensor:
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return batch


def interleaved(batch: Any, cards: Sequence[mc.Card]) -> list[Any]:
    """Every n-th sample, from the last on."""
    rows = torch.arange(len(first_tensor(batch))).flip(0)
    return [take(batch, rows[card :: len(cards)]) for card in range(len(cards))]


def uninterleaved(outputs: list[Any]) -> torch.Tensor:
    """The opposite of `interleaved`, for outputs."""
    there = [output for output in outputs if output is not None]
    whole = torch.cat(there)
    rows = torch.arange(len(whole)).flip(0)
    order = torch.cat([rows[card :: len(outputs)] for card in range(len(outputs))])
    return whole[order.argsort()]


def lopsided(batch: Any, cards: Sequence[mc.Card]) -> list[Any]:
    """The last two samples for the first card, the others, if any, for the last one, nothing for those between."""
    rows = torch.arange(len(first_tensor(batch)))
    return [take(batch, rows[-2:]), *[None] * (len(cards) - 2), take(batch, rows[:-2])]


def same(actual: Outcome, expected: Outcome) -> None:
    """Losses, parameters, buffers and optimizer states to 1e-9."""
    torch.testing.assert_close(actual.losses, expected.losses, rtol=1e-9, atol=1e-9)
    assert actual.tensors.keys() == expected.tensors.keys()
    for key, tensor in expected.tensors.items():
        close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}")
        close(actual.tensors[key], tensor)
    assert actual.without_grad == expected.without_grad
    assert actual.learning_rates == pytest.approx(expected.learning_rates, rel=1e-12)


def manual(cards: int, **splitting: Any) -> Callable[..., mc.Parallel]:
    """Make `Parallel` of strategy `manual`."""
    return partial(mc.Parallel, "manual", cards=f"cpu:{cards}", **splitting)


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("name", BY_NAME)
def test_fp64_training_by_weights_is_that_of_one_card(weights: list[float], name: str, tmp_path: Path) -> None:
    run = RUNS[f"step/{name}/torch.float64"]
    same(run(manual(len(weights), weights=weights), tmp_path), reference("step", name, torch.float64))


@pytest.mark.parametrize("name", [name for mode, name in TRAINED if mode == "loop"])
def test_loops_written_out_are_cut_by_weights_too(name: str, tmp_path: Path) -> None:
    run = RUNS[f"loop/{name}/torch.float64"]
    same(run(manual(3, weights=[5, 2, 1]), tmp_path), reference("loop", name, torch.float64))


@pytest.mark.parametrize("name", [*FEW, "adamw", "two_optimizers", "checkpointed", "gradient_penalty"])
def test_fp32_losses_are_those_of_one_card(name: str, tmp_path: Path) -> None:
    actual = RUNS[f"step/{name}/torch.float32"](manual(3, weights=[5, 2, 1]), tmp_path)
    assert actual.losses == pytest.approx(reference("step", name, torch.float32).losses, rel=1e-5)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("weights", [TINY, [30, 1, 1]], ids=str)
def test_a_card_whose_share_is_less_than_a_sample_gets_none(weights: list[float], name: str, tmp_path: Path) -> None:
    run = RUNS[f"step/{name}/torch.float64"]
    same(run(manual(len(weights), weights=weights), tmp_path), reference("step", name, torch.float64))


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("cards", [1, 3])
def test_equal_weights_are_dp_to_the_bit(cards: int, name: str, tmp_path: Path) -> None:
    run = RUNS[f"step/{name}/torch.float32"]
    by_hand = run(manual(cards, weights=[0.7] * cards), tmp_path)
    even = run(partial(mc.Parallel, "dp", cards=f"cpu:{cards}"), tmp_path)
    assert by_hand.losses == even.losses
    assert all(torch.equal(by_hand.tensors[key], tensor) for key, tensor in even.tensors.items())


@pytest.mark.parametrize("name", [*FEW, "token_sums_accumulated", "dict_batches", "two_optimizers", "frozen"])
@pytest.mark.parametrize("cards", [2, 3, 4])
@pytest.mark.parametrize("split", [interleaved, lopsided])
def test_fp64_training_by_a_split_is_that_of_one_card(split: Any, cards: int, name: str, tmp_path: Path) -> None:
    run = RUNS[f"step/{name}/torch.float64"]
    same(run(manual(cards, split=split), tmp_path), reference("step", name, torch.float64))


@pytest.mark.parametrize("name", ["clip", "accumulate_sgd", "uneven_last_batch", "tied", "batchnorm_in_eval"])
@pytest.mark.parametrize("merged", [True, False])
def test_loops_written_out_are_split_and_merged(merged: bool, name: str, tmp_path: Path) -> None:
    """Without a merge they are cut evenly."""
    making = {"split": interleaved, **({"merge": uninterleaved} if merged else {})}
    same(RUNS[f"loop/{name}/torch.float64"](manual(3, **making), tmp_path), reference("loop", name, torch.float64))


@pytest.mark.parametrize(
    "splitting",
    [{"weights": [3, 1, 2]}, {"split": interleaved}, {"weights": [1, 50, 1]}],
    ids=["weights", "split", "uneven weights"],
)
def test_resumes_bit_for_bit(splitting: dict[str, Any], tmp_path: Path) -> None:
    result = RUNS["resume"](manual(3, **splitting), tmp_path)
    assert result["parted"] == result["straight"]
    for name, tensor in result["final"].items():
        assert torch.equal(result["again"][name], tensor), name


@pytest.mark.parametrize(
    "splitting", [{"weights": [3, 1, 2]}, {"split": interleaved}, {}], ids=["weights", "split", "even"]
)
@pytest.mark.parametrize(("samples", "batch_size"), [(25, 8), (7, 3), (1, 4)])
def test_metrics_use_every_sample_exactly_once(
    splitting: dict[str, Any], samples: int, batch_size: int, tmp_path: Path
) -> None:
    result = RUNS[f"evaluate/{samples}/{batch_size}/True"](manual(3, **splitting), tmp_path)
    for metrics in result["metrics"]:
        assert metrics["samples"] == samples
        assert metrics["mean"] == pytest.approx((samples + 1) / 2, rel=1e-12)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_clips_unscaled_gradients(precision: str, tmp_path: Path) -> None:
    length = RUNS[f"clipped/{precision}/0.05/step"](manual(3, weights=[5, 2, 1]), tmp_path)
    assert length == pytest.approx(0.05, rel=1e-3)


def test_batchnorm_keeps_the_statistics_of_the_primarys_share() -> None:
    """As in `dp`, where the share is even."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3))
    alone = copy.deepcopy(module)
    parallel = mc.Parallel("manual", cards="cpu:2", weights=[3, 1])
    model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x, y = torch.randn(8, 6), torch.randn(8, 3)
    parallel.train_step(mse, model, optimizer)((x, y))
    parallel.close()
    alone(x[:6])
    torch.testing.assert_close(module[0].running_mean, alone[0].running_mean)
    torch.testing.assert_close(module[0].running_var, alone[0].running_var)


def test_a_split_that_gives_the_primary_nothing_leaves_its_buffers_and_says_so() -> None:
    def all_for_the_last(batch: Any, cards: Sequence[mc.Card]) -> list[Any]:
        return [None, batch]

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    alone = copy.deepcopy(module)
    parallel = mc.Parallel("manual", cards="cpu:2", split=all_for_the_last)
    model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    step = parallel.train_step(mse, model, optimizer)
    batch = (torch.randn(8, 6), torch.randn(8, 3))
    with pytest.warns(UserWarning, match="primary card nothing"):
        loss = step(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(batch)  # said once
    parallel.check_lockstep(model)
    parallel.close()
    torch.testing.assert_close(loss, mse(alone, batch).detach())
    assert bool((module[1].running_mean == 0).all())
    assert not torch.equal(module[0].weight, alone[0].weight)
