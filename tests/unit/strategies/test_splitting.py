"""What strategy `manual` can't be asked for is refused where it is asked, with the value and what to write instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import manycard as mc
from manycard.errors import BatchError, LossError, SettingError
from manycard.strategies.splitting import Splitting


def halves(batch: Any, cards: Any) -> list[Any]:
    return [batch[: len(batch) // 2], batch[len(batch) // 2 :]]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"weights": [2, 1, 1]}, r"weights=\[2, 1, 1\]: 3 weights for 2 cards. Fix: .* weights=\[2, 1\]"),
        ({"weights": [2]}, r"weights=\[2\]: 1 weight for 2 cards. Fix: .* weights=\[2, 1\]"),
        ({"weights": []}, r"weights=\[\]: 0 weights for 2 cards"),
        ({"weights": [1, 0]}, r"weight 1, 0, is not above 0. Fix: .*cards="),
        ({"weights": [-2, 1]}, "weight 0, -2, is not above 0"),
        ({"weights": [1, float("nan")]}, "weight 1, nan, is not above 0"),
        ({"weights": [1, float("inf")]}, "weight 1, inf, is not above 0"),
        ({"weights": [1, "2"]}, "weight 1, '2', is no number"),
        ({"weights": [True, 1]}, "weight 0, True, is no number"),
        ({"weights": [None, 1]}, "weight 0, None, is no number"),
        ({"weights": "equal"}, "weights='equal': it is neither a list of numbers nor \"auto\""),
        ({"weights": 2}, "weights=2: it is neither a list"),
        ({"weights": {0: 1}}, "it is neither a list"),
        ({"split": 3}, "split=3: it is no function"),
        ({"split": halves, "merge": [1]}, r"merge=\[1\]: it is no function"),
        ({"split": halves, "weights": [1, 1]}, "split decides by itself"),
        ({"split": halves, "weights": "auto"}, "split decides by itself"),
        ({"merge": torch.cat}, "merge=.*without split"),
        ({"sync_batchnorm": True}, 'sync_batchnorm=True: with weights="auto"'),
    ],
)
def test_settings_that_can_not_work(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words) as raised:
        mc.Parallel("manual", cards="cpu:2", **settings)
    assert "Fix: " in str(raised.value)


@pytest.mark.parametrize("strategy", ["dp", "single", "torch_dp", "ddp"])
@pytest.mark.parametrize("settings", [{"weights": [1, 1]}, {"weights": "auto"}, {"split": halves}])
def test_other_strategies_can_not_split_by_hand(strategy: str, settings: dict[str, Any]) -> None:
    name = next(iter(settings))
    with pytest.raises(SettingError, match=f'{name}=.*decides by itself.*Fix: take strategy="manual"'):
        mc.Parallel(strategy, cards="cpu:2", **settings)


def test_a_strategy_from_the_command_line_leaves_the_scripts_weights_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MANYCARD_STRATEGY", "single")
    parallel = mc.Parallel("manual", cards="cpu:1", weights=[2, 1])
    assert parallel.strategy.name == "single"
    assert "leaves the script's weights= out" in capsys.readouterr().err


@pytest.mark.parametrize("weights", [[2, 1], (2.0, 1.0), [np.int64(2), np.float32(1)], np.array([2, 1]).tolist()])
def test_numbers_of_any_kind(weights: Any) -> None:
    assert Splitting(weights).numbers == (2.0, 1.0)


def test_weights_are_found_by_timing_unless_something_is_given() -> None:
    assert Splitting().auto
    assert Splitting("auto").auto
    assert not Splitting([1, 2]).auto
    assert not Splitting(split=halves).auto


class Graphs:
    """A batch that is no nesting: it holds its tensors itself, and how many there are isn't seen from outside."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def split_graphs(batch: Graphs, cards: Any) -> list[Graphs]:
    return [Graphs(batch.x[:2]), Graphs(batch.x[2:])]


def graph_sum(model: Any, batch: Graphs) -> tuple[torch.Tensor, int]:
    return model(batch.x).square().sum(), len(batch.x)


def graph_mean(model: Any, batch: Graphs) -> torch.Tensor:
    return model(batch.x).square().mean()


def test_objects_train_with_sums_and_counts_and_not_with_means() -> None:
    torch.manual_seed(0)
    module, alone = nn.Linear(3, 1), nn.Linear(3, 1)
    alone.load_state_dict(module.state_dict())
    parallel = mc.Parallel("manual", cards="cpu:2", split=split_graphs, accumulate=2)
    model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    step = parallel.train_step(graph_sum, model, optimizer)
    batches = [Graphs(torch.randn(5, 3)), Graphs(torch.randn(7, 3))]
    losses = [step(batch) for batch in batches]
    total = sum(graph_sum(alone, batch)[0] for batch in batches) / 12
    total.backward()
    torch.testing.assert_close(module.weight.grad, alone.weight.grad)
    torch.testing.assert_close(losses[0] * 5 + losses[1] * 7, total.detach() * 12, check_dtype=False)
    with pytest.raises(LossError, match="samples of what split returns can't be counted"):
        parallel.train_step(graph_mean, model, optimizer, check_loss=False)(batches[0])
    parallel.close()


def test_a_loss_that_the_shards_of_a_split_change_is_refused() -> None:
    """By halves of equal size a mean over tokens would pass; by what the split gives it doesn't."""
    parallel = mc.Parallel("manual", cards="cpu:2", split=lambda batch, cards: [batch[:1], batch[1:]])
    module = nn.Linear(3, 1)
    model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))

    def mean_of_positive(model: Any, batch: torch.Tensor) -> torch.Tensor:
        kept = batch[:, 0] > 0
        return (model(batch).square().squeeze(1) * kept).sum() / kept.sum().clamp(min=1)

    batch = torch.tensor([[1.0, 2, 3], [-1, 0, 1], [-2, 3, 1], [3, 1, 0.5]])
    with pytest.raises(LossError, match="shards of 1 and 3"):
        parallel.train_step(mean_of_positive, model, optimizer)(batch)
    parallel.close()


def test_a_loss_that_takes_only_shards_is_said_to_be_unchecked() -> None:
    def split(batch: Any, cards: Any) -> list[Any]:
        return [{"x": batch[0][:2]}, {"x": batch[0][2:]}]

    parallel = mc.Parallel("manual", cards="cpu:2", split=split)
    module = nn.Linear(3, 1)
    model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    step = parallel.train_step(lambda model, batch: model(batch["x"]).square().mean(), model, optimizer)
    with (
        pytest.warns(UserWarning, match="loss could not be checked"),
        pytest.warns(UserWarning, match="only the number of samples is checked"),
    ):
        step((torch.randn(4, 3),))
    parallel.close()


def test_a_wrong_split_trains_nothing_and_the_next_step_works() -> None:
    wrong = [True]

    def split(batch: Any, cards: Any) -> list[Any]:
        return [batch[:2], batch[3:] if wrong[0] else batch[2:]]

    parallel = mc.Parallel("manual", cards="cpu:2", split=split)
    module = nn.Linear(3, 1)
    before = module.weight.detach().clone()
    model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    step = parallel.train_step(lambda model, batch: model(batch).square().mean(), model, optimizer)
    with pytest.raises(BatchError, match="split loses samples: the batch has 5, its shards have 4"):
        step(torch.randn(5, 3))
    assert torch.equal(module.weight, before)
    wrong[0] = False
    step(torch.randn(5, 3))
    assert not torch.equal(module.weight, before)
    parallel.close()


# ---- calls of the model --------------------------------------------------------------------------------------


def merged(**settings: Any) -> tuple[mc.Parallel, nn.Module, nn.Module]:
    torch.manual_seed(0)
    module = nn.Bilinear(3, 3, 2)
    parallel = mc.Parallel("manual", cards="cpu:2", **settings)
    return parallel, module, parallel.setup(module)


def test_calls_with_several_arguments_split_the_tuple_of_them() -> None:
    def split(batch: Any, cards: Any) -> list[Any]:
        a, b = batch
        return [(a[3:], b[3:]), (a[:3], b[:3])]

    parallel, module, model = merged(split=split, merge=lambda outputs: torch.cat(outputs[::-1]))
    a, b = torch.randn(5, 3, requires_grad=True), torch.randn(5, 3)
    out = model(a, b)
    expected = module(a, b)
    torch.testing.assert_close(out, expected)
    ours = torch.autograd.grad(out.square().sum(), [a, module.weight])
    theirs = torch.autograd.grad(expected.square().sum(), [a, module.weight])
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)
    with pytest.raises(BatchError, match="tensors by keyword"):
        model(a, input2=b)
    parallel.close()


def test_a_merge_sees_none_for_a_card_without_a_shard() -> None:
    seen: list[Any] = []

    def merge(outputs: list[Any]) -> Any:
        seen.append(outputs)
        return outputs[1]

    parallel, module, model = merged(split=lambda batch, cards: [None, batch], merge=merge)
    a = torch.randn(4, 3)
    torch.testing.assert_close(model(a, a), module(a, a))
    assert seen[0][0] is None
    assert len(seen[0]) == 2
    parallel.close()


def test_several_calls_before_one_backward_and_double_backward() -> None:
    parallel, module, model = merged(
        split=lambda batch, cards: [tuple(part[:1] for part in batch), tuple(part[1:] for part in batch)],
        merge=torch.cat,
    )
    a, b = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)

    def penalty(network: Any) -> torch.Tensor:
        out = network(a, b) + network(b, a)
        (slope,) = torch.autograd.grad(out.sum(), a, create_graph=True)
        return out.square().mean() + slope.square().sum()

    (ours,) = torch.autograd.grad(penalty(model), module.weight)
    (theirs,) = torch.autograd.grad(penalty(module), module.weight)
    torch.testing.assert_close(ours, theirs)
    parallel.close()


@pytest.mark.parametrize("settings", [{"per_card_batch": 4}, {"accumulate": "auto"}])
def test_parts_of_a_batch_are_not_for_uneven_cards(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="per_card_batch"):
        mc.Parallel(strategy="manual", cards="cpu:2", weights=[2, 1], **settings)
