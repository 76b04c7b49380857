"""Ways of cutting a call, and of joining what comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from manycard.engine.batches.joining import Join
from manycard.engine.batches.layout import Layout, Piece
from manycard.errors import BatchError
from manycard.script.comparison.layout import (
    ByTensor,
    Joined,
    ListsOfSamples,
    Mean,
    Rows,
    Same,
    Selected,
    Sum,
    TimeFirst,
    candidate_cuts,
)
from manycard.script.comparison.rules import CountedMean, rules_for

N = None


def shards(layout: Layout, batch: Any, sizes: list[int]) -> list[Any]:
    def take(tensor: Tensor, piece: Piece | None) -> Tensor:
        return tensor if piece is None else piece.of(tensor)

    return [layout.take_shard(batch, sizes, position, take) for position in range(len(sizes))]


def call(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def test_the_first_dimension_is_tried_first_with_everything_that_has_as_many_rows() -> None:
    batch = call(torch.zeros(6, 3), torch.zeros(6), torch.zeros(3, 3))
    assert candidate_cuts(batch)[0] == ByTensor((0, 0, N))


def test_a_square_mask_as_long_as_the_batch_is_also_tried_whole() -> None:
    cuts = candidate_cuts(call(torch.zeros(5, 5, 8), mask=torch.zeros(5, 5)))
    assert cuts.index(ByTensor((0, N))) < len(cuts)
    assert cuts[0] == ByTensor((0, 0))


def test_hidden_states_follow_the_batch_on_their_second_dimension() -> None:
    cuts = candidate_cuts(call(torch.zeros(9, 6, 5), torch.zeros(2, 6, 7)))
    assert ByTensor((1, 1)) in cuts


def test_nothing_to_cut_gives_no_way() -> None:
    assert candidate_cuts(call(3, "x", torch.tensor(1.0))) == []


def test_the_batchs_size_may_be_given_as_a_number() -> None:
    batch = call(torch.arange(12.0).reshape(6, 2), 6, flag=True)
    layout = ByTensor((0,), numbers=True)
    assert layout in candidate_cuts(batch)
    (args, kwargs), (rest, _) = shards(layout, batch, [4, 2])
    assert (args[0].shape, args[1], kwargs["flag"]) == ((4, 2), 4, True)
    assert (rest[0].tolist(), rest[1]) == ([[8.0, 9.0], [10.0, 11.0]], 2)


def test_lists_of_samples_are_cut_as_lists_though_each_sample_has_as_many_channels() -> None:
    images = [torch.full((3, 4, 4), float(index)) for index in range(3)]
    batch = call(images, [{"boxes": torch.zeros(3, 4)} for _ in images])
    layout = candidate_cuts(batch)[0]
    assert layout == ListsOfSamples()
    assert layout.count(batch) == 3
    (first, _), (second, _) = shards(layout, batch, [2, 1])
    assert [len(first[0]), len(second[0]), len(second[1])] == [2, 1, 1]
    assert second[0][0].shape == (3, 4, 4)
    assert second[1][0]["boxes"].shape == (3, 4)


def test_tensors_that_disagree_are_not_counted() -> None:
    with pytest.raises(BatchError):
        ByTensor((0, 0)).count(call(torch.zeros(4), torch.zeros(5)))


def joined(rule: Any, parts: list[Tensor], samples: list[int]) -> Tensor:
    join: Join | None = rule.plan(parts, samples)
    assert join is not None
    whole = join.join(parts)
    weights = torch.randn_like(whole.double())
    for index, part in enumerate(parts):
        leaf = part.double().requires_grad_()
        others = [p.double() for p in parts]
        others[index] = leaf
        (wanted,) = torch.autograd.grad((join.join(others) * weights).sum(), leaf)
        assert torch.allclose(join.gradient(weights, index), wanted)
    return whole


def test_rows_by_sample_and_rows_by_time() -> None:
    whole = torch.arange(4 * 5 * 2.0).reshape(4, 5, 2)  # (time, sample, features)
    parts = [whole[:, :3].reshape(-1, 2), whole[:, 3:].reshape(-1, 2)]
    assert torch.equal(joined(TimeFirst(0), parts, [3, 2]), whole.reshape(-1, 2))
    by_sample = whole.transpose(0, 1)
    parts = [by_sample[:3].reshape(-1, 2), by_sample[3:].reshape(-1, 2)]
    assert torch.equal(joined(Rows(0), parts, [3, 2]), by_sample.reshape(-1, 2))


def test_scalars_join_as_means_or_sums() -> None:
    values = torch.randn(5)
    parts = [values[:3].mean(), values[3:].mean()]
    assert torch.allclose(joined(Mean(), parts, [3, 2]), values.mean())
    parts = [values[:3].sum(), values[3:].sum()]
    assert torch.allclose(joined(Sum(), parts, [3, 2]), values.sum())


def test_rules_refuse_shapes_that_do_not_follow() -> None:
    odd = [torch.zeros(5, 2), torch.zeros(2, 2)]
    assert Rows(0).plan(odd, [3, 2]) is None
    assert TimeFirst(0).plan(odd, [3, 2]) is None
    assert Mean().plan(odd, [3, 2]) is None
    assert Same().plan([torch.zeros(2), torch.zeros(2)], [3, 2]) is None
    assert Mean().plan([torch.tensor(1), torch.tensor(2)], [3, 2]) is None
    assert torch.equal(joined(Selected(0), odd, [3, 2]), torch.zeros(7, 2))


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("ignored", [-100, -1])
def test_a_mean_over_tokens_is_weighted_by_tokens(shifted: bool, ignored: int) -> None:
    labels = torch.tensor([[1, 2, 3, ignored], [4, ignored, ignored, ignored], [5, 6, 7, 8]])
    values = torch.randn(3, 4, dtype=torch.float64)
    start = 1 if shifted else 0

    def loss(rows: slice) -> Tensor:
        counted = labels[rows, start:] != ignored
        return values[rows, start:][counted].mean()

    batch, cut = call(labels), ByTensor((0,))
    rule = CountedMean(0, ignored, shifted)
    parts = [loss(slice(0, 2)), loss(slice(2, 3))]
    assert rule in list(rules_for(0, batch))
    assert torch.allclose(joined(rule.bind(batch, cut, [2, 1]), parts, [2, 1]), loss(slice(0, 3)))
    assert rule.uneven(batch, cut, [2, 1])
    assert not rule.uneven(call(labels.clamp(min=0)), cut, [2, 1])


def test_a_card_whose_labels_are_all_ignored_adds_nothing() -> None:
    labels = torch.tensor([[1, 2], [-100, -100]])
    rule = CountedMean(0, -100, shifted=False).bind(call(labels), ByTensor((0,)), [1, 1])
    join = rule.plan([torch.tensor(3.0), torch.tensor(float("nan"))], [1, 1])
    assert join is not None
    assert join.join([torch.tensor(3.0), torch.tensor(float("nan"))]).item() == 3.0
    assert join.gradient(torch.tensor(1.0), 1).item() == 0.0


def test_outputs_that_come_otherwise_than_before_are_refused() -> None:
    layout = Joined(ByTensor((0,)), (Rows(0),))
    with pytest.raises(BatchError, match="shapes"):
        layout.plan_join(0, [torch.zeros(3), torch.zeros(4)], [2, 1], "0")
    with pytest.raises(BatchError):
        layout.plan_join(1, [torch.zeros(2), torch.zeros(1)], [2, 1], "1")
