"""What goes into and comes out of `mc.DataParallel`: any nesting, any size, any dimension."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import manycard as mc
from manycard.errors import BatchError, ManycardError

from .twins import CARDS, batch, close, same_state, spread, twins


@dataclass
class Fields:
    x: Tensor
    scale: float
    more: dict[str, Any]


class Named(NamedTuple):
    x: Tensor
    note: str


class Output(dict):
    """A dict of its own kind, as model libraries return."""


class Echo(nn.Module):
    """Returns what it got, times a parameter, whatever the nesting."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self._times((args, kwargs))
        return out if args and kwargs else out[0] if args else out[1]

    def _times(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value * self.factor
        if isinstance(value, Fields):
            return Fields(self._times(value.x), value.scale, self._times(value.more))
        if isinstance(value, dict):
            return type(value)((key, self._times(part)) for key, part in value.items())
        if isinstance(value, Named):
            return Named(self._times(value.x), value.note)
        if isinstance(value, tuple | list):
            return type(value)(self._times(part) for part in value)
        return value


def _structures(x: Tensor) -> dict[str, Any]:
    return {
        "dict": {"a": x, "b": {"c": x + 1, "d": None}},
        "ordered dict": OrderedDict(a=x, b=x * 3),
        "dict of its own kind": Output(a=x, b=(x, None)),
        "tuple": (x, x[:, 0], None),
        "list": [x, [x + 1]],
        "dataclass": Fields(x, 0.5, {"more": x}),
        "named tuple": Named(x, "note"),
        "three dimensions": x.view(len(x), 2, 3),
        "plain values": {"x": x, "flag": True, "name": "n", "number": 3, "none": None},
    }


@pytest.mark.parametrize("samples", [1, 2, 3, 7])
@pytest.mark.parametrize("name", _structures(batch(1)))
def test_structures_in_and_out(name: str, samples: int) -> None:
    alone, together = twins(Echo)
    value = _structures(batch(samples))[name]
    expected, actual = alone(value), together(value)
    assert type(actual[0]) is type(expected[0])
    if isinstance(actual[0], Fields):
        actual, expected = [vars(actual[0])], [vars(expected[0])]
    close(_without_plain(actual), _without_plain(expected))
    assert _plain(actual) == _plain(expected)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _without_plain(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in _without_plain(part)]


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_keyword_arguments_with_fewer_samples_than_cards(samples: int) -> None:
    """Report kind dp-structured-io."""
    alone, together = twins(Echo, 4)
    x = batch(samples)
    close(together(x, mask=x > 0, scale=x[:, 0], flag=None), alone(x, mask=x > 0, scale=x[:, 0], flag=None))
    close(together(mask=x), alone(mask=x))


class Scalars(nn.Module):
    """Means and counts instead of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.line(x)
        return {"loss": y.square().mean(), "rows": torch.tensor(len(x)), "number": float(y.detach().mean()), "y": y}


@pytest.mark.parametrize("cards", CARDS)
@pytest.mark.parametrize("samples", [2, 7])
def test_scalars_come_out_as_the_mean_over_samples(cards: int, samples: int) -> None:
    """Report kinds dp-scalar-gather, loss-averaging: a mean of the cards' means would be wrong."""
    alone, together = twins(Scalars, cards)
    x = batch(samples)
    expected, actual = alone(x), together(x)
    assert actual["loss"].shape == ()
    close({**actual}, {**expected})
    for out in (expected, actual):
        out["loss"].backward()
    same_state(alone, together)


def test_arguments_without_the_batchs_size_go_to_every_card_whole() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(6, 3)

        def forward(self, x: Tensor, weights: Tensor, scale: Tensor, power: int) -> Tensor:
            assert weights.shape == (3,)
            return (self.line(x) * weights * scale) ** power

    alone, together = twins(Weighted)
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    arguments = batch(7), weights, torch.tensor(2.0, dtype=torch.float64), 2
    close(together(*arguments), alone(*arguments))


def test_a_list_of_samples_is_cut_as_samples() -> None:
    """Detection models take a list of images of unequal sizes and give a list of results."""

    class Sizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(3, 2)

        def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
            assert len(images) == len(targets)
            return [{"score": self.line(i).mean(0) + t["y"]} for i, t in zip(images, targets, strict=True)]

    alone, together = twins(Sizes)
    images = [batch(2 + index, 3, seed=index) for index in range(5)]
    targets = [{"y": torch.tensor([float(index)], dtype=torch.float64)} for index in range(5)]
    expected, actual = alone(images, targets), together(images, targets)
    assert isinstance(actual, list)
    close(actual, expected)
    for out in (expected, actual):
        sum(part["score"].sum() for part in out).backward()
    same_state(alone, together)


@pytest.mark.parametrize("rows", [(2, 2, 5, 7), (2, 2, 2, 2), (4, 1, 1, 4)])
def test_results_of_samples_stay_samples_whatever_their_rows(rows: tuple[int, ...]) -> None:
    """A result's rows may happen to number as many as a card's samples, 2, or the batch's, 4."""

    class Boxes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(3, 2)

        def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
            assert len(images) == len(targets)
            return [{"boxes": self.line(i) + t["offset"]} for i, t in zip(images, targets, strict=True)]

    alone, together = twins(Boxes, 2)
    images = [batch(count, 3, seed=index) for index, count in enumerate(rows)]
    targets = [{"offset": batch(1, 2, seed=index)} for index in range(len(rows))]
    close(together(images, targets), alone(images, targets))


@pytest.mark.parametrize("cards", CARDS)
@pytest.mark.parametrize("samples", [1, 2, 3, 5, 8])
def test_any_dimension_and_any_remainder(cards: int, samples: int) -> None:
    """Report kind dp-uneven-batch: a state made inside forward has the shard's size."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRU(6, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            start = x.new_zeros(1, x.size(1), 4)
            return self.cell(x, start)

    alone, together = twins(Recurrent, cards, dim=1)
    x = torch.stack([batch(samples, seed=time) for time in range(9)])
    expected, actual = alone(x), together(x)
    close(actual, expected)
    for out in (expected, actual):
        (out[0].square().sum() + out[1].sum()).backward()
    same_state(alone, together)


@pytest.mark.parametrize("output_device", [None, 0, 1, 2, "balanced", "rotate"])
def test_output_device_changes_no_values(output_device: Any) -> None:
    alone, together = twins(Scalars, 3, output_device=output_device)
    for samples in (7, 2, 6):
        x = batch(samples)
        close({**together(x)}, {**alone(x)})


@pytest.mark.parametrize(
    ("setting", "value"),
    [("output_device", 7), ("output_device", "everywhere"), ("device_ids", []), ("device_ids", "cpu:0")],
)
def test_settings_that_name_no_card_are_refused(setting: str, value: Any) -> None:
    options = {"device_ids": "cpu:3", setting: value}
    with pytest.raises(ManycardError) as caught:
        mc.DataParallel(Scalars(), **options)
    assert setting in str(caught.value)
    assert "Fix:" in str(caught.value)


class Holder:
    """Holds a tensor where nothing can see it."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_an_unknown_holder_of_tensors_is_refused_going_in() -> None:
    together = spread(Echo().double())
    with pytest.raises(BatchError, match="Holder"):
        together(Holder(batch(6)))
    with pytest.raises(BatchError, match="Holder"):
        together(batch(6), more={"deep": [Holder(batch(6))]})
    close(together(batch(6))[0], batch(6) * 2)


def test_an_unknown_holder_of_tensors_is_refused_coming_out() -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Holder:
            return Holder(self.line(x))

    with pytest.raises(BatchError, match="Holder"):
        spread(Holding().double())(batch(6))


def test_a_packed_sequence_is_refused_as_its_rows_are_no_samples() -> None:
    packed = pack_padded_sequence(torch.stack([batch(4), batch(4, seed=2)]), [2, 2, 1, 1])
    with pytest.raises(BatchError, match="PackedSequence"):
        spread(nn.GRU(6, 4).double())(packed)


def test_outputs_that_follow_no_samples_are_refused() -> None:
    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.line(x)[x[:, 0] > 0]

    x = batch(7)
    x[:, 0] = torch.tensor([1.0, -1, -1, 1, 1, 1, 1])
    with pytest.raises(BatchError, match="Fix:"):
        spread(Ragged().double())(x)


def test_an_argument_may_be_absent() -> None:
    class Still(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.ones(2, 3))

        def forward(self) -> Tensor:
            return self.value * 2

    alone, together = twins(Still)
    expected, actual = alone(), together()
    close(actual, expected)
    for out in (expected, actual):
        out.sum().backward()
    same_state(alone, together)


def test_a_batch_without_samples_is_as_on_one_card() -> None:
    alone, together = twins(lambda: nn.Linear(6, 3))
    close(together(batch(0)), alone(batch(0)))
