"""shard_optimizer on real cards: the bits of mirrored updates, and a part of the state on each card."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manycard as mc

COUNTS = [count for count in (2, 3, 4, 8) if count <= torch.cuda.device_count()]
WIDTH = 1024


def train(cards: int, *, shard: bool, fused: bool, precision: str) -> tuple[list[float], nn.Module, list[int], Any]:
    """Losses, the model, each card's memory after some steps, and the optimizer's state dict."""
    torch.cuda.empty_cache()
    before = [torch.cuda.memory_allocated(card) for card in range(cards)]
    parallel = mc.Parallel("dp", cards=cards, precision=precision, shard_optimizer=shard, seed=1)
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)])
    model, optimizer = parallel.setup(net, torch.optim.AdamW(net.parameters(), 1e-3, fused=fused))

    def loss_fn(model: Any, batch: Tensor) -> Tensor:
        return (model(batch) - 1).square().mean()

    step = parallel.train_step(loss_fn, model, optimizer, clip_norm=1.0, graphs="off")
    torch.manual_seed(2)
    losses = [float(step(torch.randn(16 * cards + 3, WIDTH))) for _ in range(6)]
    parallel.strategy.check_lockstep(model)
    memory = [torch.cuda.memory_allocated(card) - old for card, old in enumerate(before)]
    state = optimizer.state_dict()
    parallel.close()
    return losses, net, memory, state


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cards", COUNTS)
def test_the_bits_of_mirrored_updates_with_less_memory(cards: int, fused: bool, precision: str) -> None:
    losses, net, memory, state = train(cards, shard=False, fused=fused, precision=precision)
    own_losses, own, own_memory, own_state = train(cards, shard=True, fused=fused, precision=precision)
    assert losses == own_losses
    for parameter, twin in zip(net.parameters(), own.parameters(), strict=True):
        assert torch.equal(parameter, twin)
    assert state["state"].keys() == own_state["state"].keys()
    for number, values in state["state"].items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(value).cpu(), torch.as_tensor(own_state["state"][number][key]).cpu())
    kept = 2 * 8 * (WIDTH + 1) * WIDTH * 4
    saved = [whole - part for whole, part in zip(memory, own_memory, strict=True)]
    assert sum(saved) >= 0.9 * (cards - 1) * kept, saved
