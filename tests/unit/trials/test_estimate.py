"""Counting a training without any card, compared with what can be worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manycard.planner.card_models import CARD_MODELS, derived_ms, parse_cards_model
from manycard.trials.estimate import count_step, largest_part_mib


def squared(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def test_a_linear_layer_is_counted_as_by_hand() -> None:
    model = nn.Linear(64, 32, bias=False)
    before = model.weight.detach().clone()
    counted = count_step(squared, model, torch.ones(8, 64))
    products = sum(operations for operations, _ in counted.operators)
    # Forward, and the gradient of the weight: two products of 8 x 64 x 32, two operations an element.
    assert products == 2 * (2 * 8 * 64 * 32)
    assert counted.samples == 8
    assert counted.output_mib == pytest.approx(8 * 32 * 4 / 2**20)
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None
    assert model.weight.device.type == "cpu"


def test_what_backward_keeps_grows_with_the_batch_and_leaves_parameters_out() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1))
    small, large = (count_step(squared, model, torch.ones(n, 64)).activations_mib for n in (8, 16))
    assert large == pytest.approx(2 * small)
    # Tanh keeps its output, the last layer its input (the same tensor), the square its input.
    assert small == pytest.approx(8 * (128 + 1) * 4 / 2**20)


def test_a_loss_that_reads_values_is_counted_on_the_cpu() -> None:
    def reads(model: Any, batch: Tensor) -> Tensor:
        loss = model(batch).square().mean()
        return loss * 2 if loss.item() > 0 else loss

    assert count_step(reads, nn.Linear(4, 2), torch.ones(3, 4)).operators


def test_tied_weights_are_counted_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4, bias=False)
            self.two = nn.Linear(4, 4, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    assert count_step(squared, Tied(), torch.ones(3, 4)).operators


def test_the_largest_block_of_a_list() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 4)))
    assert largest_part_mib(model) == pytest.approx((4 * 100 + 100 + 100 * 4 + 4) * 4 / 2**20)


@pytest.mark.parametrize(
    ("text", "count", "model", "kind"),
    [
        ("8xH100 NVLink", 8, "H100", "NVLink"),
        ("H200", 1, "H200", "NVLink"),
        ("4 x RTX 4090", 4, "RTX 4090", "PCIe"),
        ("2xNVIDIA A100 40GB pcie", 2, "A100 40GB", "PCIe"),
        ("2xh100 pcie", 2, "H100 PCIe", "PCIe"),
        ("2xH200 PCIe", 2, "H200", "PCIe"),
    ],
)
def test_cards_that_are_not_here(text: str, count: int, model: str, kind: str) -> None:
    cards, links, product = parse_cards_model(text)
    assert (len(cards), product.name, links.kind) == (count, model, kind)
    assert links.stated
    assert links.p2p is (model != "RTX 4090")


@pytest.mark.parametrize("text", ["", "8x", "eight H100", "8xH999", "0xH100", "2xL40S NVLink"])
def test_cards_that_nobody_knows(text: str) -> None:
    from manycard.errors import SettingError

    with pytest.raises(SettingError, match="--cards-model"):
        parse_cards_model(text)


def test_every_figure_has_its_source_and_half_precision_is_not_slower() -> None:
    operators = [(1e12, 1e9), (0.0, 5e8), (1e3, 1e3)]
    for model in CARD_MODELS:
        assert model.source
        assert 0 < derived_ms(operators, model, "bf16") <= derived_ms(operators, model, "fp32")
    h100 = parse_cards_model("H100")[2]
    by_hand = 1e12 / (0.5 * 989e9) + 0.6 * 5e8 / (0.75 * 3350e6) + 0.002
    assert derived_ms(operators, h100, "bf16") == pytest.approx(by_hand, rel=1e-6)
