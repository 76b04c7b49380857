"""A step that ran out of memory and is taken again is the step that would have been taken with the smaller shares."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import manycard as mc
from manycard.engine.driving.threads import current_place


class Draws(nn.Module):
    """BatchNorm, dropout, draws on the host, and buffers that forward writes and replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.last = nn.Linear(8, 2)
        self.register_buffer("written", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(1))
        self.written: Tensor
        self.replaced: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.written += 1
        self.replaced = self.replaced + x.mean().detach()
        noise = random.random() + float(np.random.rand())
        return self.last(self.drop(self.norm(self.first(x)))) * noise


class Run:
    """Two steps and what is left of them; card 1 may run out of memory, after it has drawn and written."""

    def __init__(self, cards: int, most: int | None, planted_in: str = "forward", **settings: Any) -> None:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        self.attempts = 0
        module = Draws()
        parallel = mc.Parallel("manual", cards=f"cpu:{cards}", **settings)
        model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))

        def loss_fn(model: Any, x: Tensor) -> Tensor:
            place = current_place()
            self.attempts += place is not None and place.position == 0
            loss = model(x).square().mean()
            if most is not None and place is not None and place.position == 1 and len(x) > most:
                if planted_in == "forward":
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                loss.register_hook(_out_of_memory)
            return loss

        step = parallel.train_step(loss_fn, model, optimizer, check_loss=False)
        x = torch.randn(24, 6)
        self.losses = [step(x).item(), step(x).item()]
        self.shares = parallel.strategy.shares(model)
        self.state = {name: value.clone() for name, value in module.state_dict().items()}
        self.draws = [random.random(), np.random.rand(), torch.rand(()).item()]
        self.cards = parallel.strategy.generators.state_dict()["states"]
        parallel.close()


def _out_of_memory(gradient: Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("planted_in", ["forward", "backward"])
@pytest.mark.parametrize(("cards", "most"), [(2, 10), (3, 7), (2, 6)])
def test_buffers_and_random_states_are_those_of_a_step_that_did_not_fail(
    cards: int, most: int, planted_in: str
) -> None:
    """With (2, 6) memory runs out several times in a row."""
    failed = Run(cards, most, planted_in, weights="auto")
    assert failed.attempts > 2, "the step was taken again"
    expected = Run(cards, None, weights=list(failed.shares or ()))
    assert expected.attempts == 2
    assert failed.losses == expected.losses
    for name, value in expected.state.items():
        torch.testing.assert_close(failed.state[name], value, rtol=0, atol=0, msg=f"{name} differs")
    assert failed.draws == expected.draws
    assert all(torch.equal(one, other) for one, other in zip(failed.cards[1:], expected.cards[1:], strict=True))
