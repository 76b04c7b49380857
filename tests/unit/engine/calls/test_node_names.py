"""What spread calls' nodes are called: as one card's last operation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import manycard as mc


class Returns(nn.Module):
    """A linear layer, and what is made of its output."""

    def __init__(self, then: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.then = then

    def forward(self, x: Any) -> Any:
        return self.then(self.layer(x))


@pytest.mark.parametrize(
    "then",
    [
        lambda scores: scores,
        torch.tanh,
        lambda scores: scores.log_softmax(-1),
        lambda scores: scores[:, 1],
        lambda scores: scores.square().mean(),
    ],
    ids=["linear", "tanh", "softmax", "select", "mean"],
)
def test_a_printed_output_is_one_cards(then: Any) -> None:
    module = Returns(then)
    x = torch.randn(6, 4)
    one, many = module(x), _spread(module, x)
    assert repr(one) == repr(many)
    assert one.grad_fn.name() == many.grad_fn.name()


def _spread(module: nn.Module, x: torch.Tensor) -> Any:
    return mc.DataParallel(module, device_ids="cpu:2")(x)


def test_a_loss_among_the_outputs_gives_its_name() -> None:
    module = Returns(lambda scores: (scores, functional.cross_entropy(scores, torch.zeros(len(scores)).long())))
    scores, loss = _spread(module, torch.randn(6, 4))
    assert "grad_fn=<NllLossBackward0>" in repr(loss)
    assert scores.grad_fn is loss.grad_fn


def test_gradients_flow_as_before_also_twice() -> None:
    module, x = Returns(torch.tanh), torch.randn(6, 4)
    found = []
    for call in (module, lambda x: _spread(module, x)):
        loss = call(x).square().sum()
        first = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), list(module.parameters())))
    for one, many in zip(*found, strict=True):
        torch.testing.assert_close(one, many)
