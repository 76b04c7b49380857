"""Pipelines on real cards: the same training as one card, stages on their cards, copies beside computing, failures."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manycard as mc
from manycard.cards.card import Card
from manycard.pipeline.copies import StageCopies
from tests.strategies.pipelined import Language, batches, loss_fn, made, sgd

COUNTS = [count for count in (1, 2, 4, 8) if count <= torch.cuda.device_count()] or [1]
SEVERAL = [count for count in COUNTS if count > 1]
EVEN = [count for count in COUNTS if count % 2 == 0]


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    """Leave no memory of one test to the next."""
    yield
    torch.cuda.empty_cache()


def alone(model: nn.Module, data: list[Tensor], clip_norm: float | None) -> tuple[list[float], nn.Module]:
    """The training in plain PyTorch on the first card."""
    model = copy.deepcopy(model).to("cuda:0")
    optimizer = sgd(model)
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = loss_fn(model, batch.to("cuda:0"))
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def compare(model: nn.Module, data: list[Tensor], *, clip_norm: float | None = None, **settings: Any) -> nn.Module:
    """Train both ways; losses and parameters must agree. Returns the pipeline's model."""
    expected, single = alone(model, data, clip_norm)
    spread = copy.deepcopy(model)
    optimizer = sgd(spread)
    pipeline = mc.Pipeline(spread, **settings)
    step = pipeline.train_step(loss_fn, optimizer, clip_norm=clip_norm)
    losses = [step(batch).item() for batch in data]
    pipeline.close()
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    for (name, mine), theirs in zip(single.state_dict().items(), spread.state_dict().values(), strict=True):
        torch.testing.assert_close(
            theirs.cpu(), mine.cpu(), rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    return spread


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [1, 4, 8])
@pytest.mark.parametrize("cards", COUNTS)
def test_training_is_that_of_one_card(cards: int, micro_batches: int, schedule: str) -> None:
    model = made(make=lambda: Language(blocks=8))
    data = batches(16, 16, 13, 3)
    names = [f"blocks.{stage * 8 // cards}" for stage in range(cards)][1:]
    spread = compare(
        model, data, cards=cards, stages=names, micro_batches=micro_batches, schedule=schedule, clip_norm=0.5
    )
    assert len({parameter.device for parameter in spread.parameters()}) == cards
    assert spread.head.weight is spread.words.weight


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("cards", COUNTS)
def test_stages_found_by_measuring(cards: int, checkpointed: bool) -> None:
    compare(
        made(make=lambda: Language(blocks=8)),
        batches(16, 16, 5),
        cards=cards,
        checkpoint_activations=checkpointed,
    )


@pytest.mark.parametrize("cards", EVEN)
def test_replicas_beside_stages(cards: int) -> None:
    compare(
        made(make=lambda: Language(blocks=8)),
        batches(16, 16, 5, 1),
        cards=cards,
        replicas=2,
        micro_batches=3,
        clip_norm=0.5,
    )


class Keeps(nn.Module):
    """A block with tensors that are neither parameters nor buffers: one of its own, and one that all blocks share."""

    def __init__(self, shared: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)
        self.mask = torch.linspace(0.5, 1.0, 12, device="cuda:0")
        self.tables = {"shift": [shared]}

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.mask + self.tables["shift"][0]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("cards", SEVERAL)
def test_tensors_kept_as_plain_attributes(cards: int, replicas: int) -> None:
    model = made(make=lambda: Language(blocks=8))
    shared = torch.linspace(-0.1, 0.1, 12, device="cuda:0")
    for index in range(8):
        model.blocks[index] = Keeps(shared)
    stages = cards // replicas
    names = [f"blocks.{stage * 8 // stages}" for stage in range(stages)][1:]
    spread = compare(model, batches(16, 13), cards=cards, replicas=replicas, stages=names, micro_batches=2)
    for block in spread.blocks:
        assert block.mask.device == block.layer.weight.device
        assert block.tables["shift"][0].device == torch.device("cuda:0") or stages == 1


@pytest.mark.parametrize("cards", SEVERAL)
def test_a_plain_attribute_that_the_script_sets_between_steps_moves_too(cards: int) -> None:
    model = made(make=lambda: Language(blocks=8))
    for index in range(8):
        model.blocks[index] = Keeps(torch.zeros(12, device="cuda:0"))
    names = [f"blocks.{stage * 8 // cards}" for stage in range(cards)][1:]
    pipeline = mc.Pipeline(model, cards, stages=names, micro_batches=2)
    step = pipeline.train_step(loss_fn, sgd(model))
    (batch,) = batches(8)
    step(batch)
    model.blocks[7].mask = torch.zeros(12, device="cuda:0")
    assert step(batch).isfinite()
    assert model.blocks[7].mask.device == pipeline.cards[-1].device
    pipeline.close()


@pytest.mark.parametrize("cards", SEVERAL)
def test_a_generator_of_another_card_is_refused_by_name(cards: int) -> None:
    model = made(make=lambda: Language(blocks=8))
    model.blocks[7].draws = torch.Generator("cuda:0")
    names = [f"blocks.{stage * 8 // cards}" for stage in range(cards)][1:]
    pipeline = mc.Pipeline(model, cards, stages=names, micro_batches=2)
    step = pipeline.train_step(loss_fn, sgd(model))
    with pytest.raises(mc.errors.ModelError, match=r"attribute blocks.7.draws is a random generator of cuda:0"):
        step(batches(8)[0])
    pipeline.close()


class Wide(nn.Module):
    """Layers whose matrix products take half a millisecond each, with 8,192 rows."""

    def __init__(self, layers: int, width: int = 4096) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x)) * 0.1
        return x


@pytest.mark.parametrize("cards", SEVERAL)
def test_the_bubble_is_that_of_theory_and_memory_is_shared_out(cards: int) -> None:
    torch.manual_seed(0)
    model = Wide(8 * cards)
    names = [f"layers.{8 * stage}" for stage in range(1, cards)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    pipeline = mc.Pipeline(model, cards, stages=names, micro_batches=4 * cards, precision="bf16")
    step = pipeline.train_step(lambda model, x: model(x).square().mean(), optimizer)
    x = torch.randn(4 * cards * 8192, 4096, device=pipeline.device)
    for _ in range(4):
        step(x)
    timelines = [pipeline.record(step, x) for _ in range(3)]
    pipeline.close()
    best = min(timelines, key=lambda timeline: timeline.bubble)
    assert best.bubble < best.expected_bubble + 0.07, [timeline.as_dict()["bubble"] for timeline in timelines]
    sizes = [sum(p.nbytes for p in model.parameters() if p.device == card.device) for card in pipeline.cards]
    assert max(sizes) == min(sizes)


@pytest.mark.parametrize("cards", SEVERAL)
def test_an_exception_ends_the_step_at_once_and_the_next_one_works(cards: int) -> None:
    model = made(make=lambda: Language(blocks=8))
    names = [f"blocks.{stage * 8 // cards}" for stage in range(cards)][1:]
    last = model.blocks[7]
    pipeline = mc.Pipeline(model, cards, stages=names, micro_batches=8)
    step = pipeline.train_step(loss_fn, sgd(model))
    (batch,) = batches(16)
    first = step(batch).item()
    broken = last.register_forward_hook(lambda *_: 1 / 0)
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError) as caught:
        step(batch)
    assert time.monotonic() - began < 5
    assert f"in stage {cards - 1}" in " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    broken.remove()
    assert step(batch).item() < first
    pipeline.close()


@pytest.mark.parametrize("cards", COUNTS)
def test_outputs_come_to_the_first_card(cards: int) -> None:
    model = made(make=lambda: Language(blocks=8)).eval()
    (ids,) = batches(10)
    expected = copy.deepcopy(model)(ids).detach()
    pipeline = mc.Pipeline(model, cards, micro_batches=4)
    found = pipeline(ids.to("cuda:0"))
    pipeline.close()
    assert found.device == pipeline.device == pipeline.cards[0].device
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cards", SEVERAL)
def test_gradients_that_come_back_do_not_wait_for_activations_that_arrive(cards: int) -> None:
    """Stage 1 of 3 gets both; the stage before it computes for long. With two cards the outer stages share one."""
    devices = [torch.device("cuda", index % min(cards, 3)) for index in range(3)]
    copies = StageCopies([Card(place, device) for place, device in enumerate(devices)])
    with torch.cuda.stream(torch.cuda.Stream(devices[2])):
        gradient = torch.full((1 << 20,), 2.0, device=devices[2])
        torch.cuda.current_stream(devices[2]).synchronize()
        with torch.cuda.device(devices[0]), torch.cuda.stream(torch.cuda.Stream(devices[0])):
            torch.cuda._sleep(2_000_000_000)
            activation = torch.full((1 << 20,), 1.0, device=devices[0])
            forward = copies.send(activation, 0, 1)
        back = copies.send(gradient, 2, 1)
    assert forward.arrived is not None
    assert back.arrived is not None
    back.arrived.synchronize()
    assert not forward.arrived.query()
    assert copies.receive(back, 1).mean().item() == 2.0
    forward.arrived.synchronize()
    assert copies.receive(forward, 1).mean().item() == 1.0


@pytest.mark.parametrize("cards", EVEN)
def test_a_batch_made_on_a_stream_of_the_scripts_own_is_waited_for_by_every_replica(cards: int) -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(cards)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    pipeline = mc.Pipeline(model, cards, replicas=2, micro_batches=1)
    step = pipeline.train_step(lambda model, x: model(x).square().mean(), optimizer, check_loss=False)
    with torch.cuda.stream(torch.cuda.Stream(pipeline.device)):
        x = torch.zeros(64, 512, device=pipeline.device)
        step(x)
        for value in (1.0, 2.0, 3.0):
            torch.cuda._sleep(200_000_000)
            x.fill_(value)
            loss = step(x).item()
            whole = nn.Sequential(*copy.deepcopy(list(model))).cpu()
            assert loss == pytest.approx(whole(x.cpu()).square().mean().item(), rel=1e-4)
    pipeline.close()


def test_a_stage_that_cannot_fit_is_refused_before_it_is_tried() -> None:
    cards = COUNTS[-1]
    pipeline = mc.Pipeline(made(), cards, memory="1KiB")
    step = pipeline.train_step(loss_fn, sgd(pipeline.module))
    with pytest.raises(mc.errors.ModelError, match="needs about"):
        step(batches(4)[0])
    pipeline.close()
