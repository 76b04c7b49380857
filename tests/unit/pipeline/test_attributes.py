"""Tensors that modules keep as plain attributes. Where they move on real cards: tests/gpu/test_pipeline.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manycard.errors import ModelError
from manycard.pipeline.attributes import attributes_of, settle_attributes
from tests.strategies.pipelined import compare, loss_fn, made, pipelined, sgd

CPU = torch.device("cpu")


class Keeps(nn.Module):
    """Keeps tensors in every way that is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.mask = torch.ones(2)
        self.tables = {"cos": torch.ones(3), "others": [torch.ones(4), 5]}
        self.state = SimpleNamespace(cache=torch.ones(5), name="x")
        self.draws = torch.Generator()
        self.register_buffer("counted", torch.zeros(1))
        self.itself = self.forward


def test_attributes_are_found_with_their_paths() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Keeps())
    assert [each.path for each in attributes_of(model) if not each.own] == ["1.state.cache"]
    found = {each.path: each.value for each in attributes_of(model)}
    assert list(found) == [
        "1.mask",
        "1.tables['cos']",
        "1.tables['others'][0]",
        "1.state.cache",
        "1.draws",
    ]
    assert [value.numel() for value in found.values() if isinstance(value, Tensor)] == [2, 3, 4, 5]


def test_what_lies_on_the_host_stays_there_and_a_parameter_of_another_stage_makes_a_stranger() -> None:
    model = nn.Sequential(Keeps(), Keeps())
    model[1].borrowed = [model[0].layer.weight]
    stage_of = {id(inner): stage for stage in (0, 1) for inner in model[stage].modules()}
    home_of = {id(each): stage for stage in (0, 1) for each in [*model[stage].parameters(), *model[stage].buffers()]}
    before = [id(each.value) for each in attributes_of(model)]
    assert settle_attributes(model, stage_of, home_of, [CPU, CPU]) == {id(model[1])}
    assert [id(each.value) for each in attributes_of(model)] == before


class Borrows(nn.Module):
    """A head that uses a parameter of another stage, which it keeps in a list."""

    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)
        self.borrowed = [scale]
        self.mask = torch.linspace(0.5, 1.0, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.borrowed[0].mean() * self.mask


@pytest.mark.parametrize("settings", [{"cards": "cpu:2"}, {"cards": "cpu:4", "replicas": 2}])
def test_a_borrowed_parameter_and_a_kept_mask_train_as_on_one_card(settings: dict[str, Any]) -> None:
    model = made()
    model.blocks[3] = Borrows(model.places)
    compare(model, [torch.randint(0, 29, (8, 6)) for _ in range(3)], stages=["blocks.2"], micro_batches=2, **settings)


def test_a_tensor_that_requires_gradients_is_refused_by_name() -> None:
    model = made()
    model.blocks[3].scales = [torch.ones(12, requires_grad=True)]
    with pipelined(model, "cpu:2", stages=["blocks.2"]) as pipeline:
        step = pipeline.train_step(loss_fn, sgd(model))
        with pytest.raises(ModelError, match=r"attribute blocks.3.scales\[0\] is a tensor that requires gradients"):
            step(torch.randint(0, 29, (8, 6)))
    model.blocks[3].scales = SimpleNamespace(of_somebody_else=torch.ones(12, requires_grad=True))
    with pipelined(model, "cpu:2", stages=["blocks.2"]) as pipeline:
        assert pipeline.train_step(loss_fn, sgd(model))(torch.randint(0, 29, (8, 6))).isfinite()
    model.blocks[3].scales = [torch.ones(12, requires_grad=True)]
    with pipelined(model, "cpu:1") as pipeline:
        assert pipeline.train_step(loss_fn, sgd(model))(torch.randint(0, 29, (8, 6))).isfinite()
