"""Outputs left on the cards that made them, on real cards: memory in balance, one card's numbers, and no hanging."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manycard as mc
from manycard.engine.spread_tensor import SpreadTensor

COUNTS = [count for count in (1, 2, 4, 8) if count <= torch.cuda.device_count()] or [1]
SEVERAL = [count for count in COUNTS if count > 1]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA cards")
WORDS, TIMES, WIDTH = 16384, 64, 128


class Words(nn.Module):
    """A small language model with a large vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.words(tokens)))


def twins(cards: int, **options: Any) -> tuple[nn.Module, Any]:
    """A module alone on the first card, and its twin over several."""
    torch.manual_seed(0)
    alone = Words().cuda()
    return alone, mc.DataParallel(copy.deepcopy(alone), device_ids=list(range(cards)), **options)


def batch(samples: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and the next ones, some of them ignored, more of them in the first samples."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, WORDS, (samples, TIMES + 1), generator=generator)
    ignored = torch.rand(samples, TIMES, generator=generator) * torch.linspace(0.5, 2, samples)[:, None] < 0.4
    return tokens[:, :-1].cuda(), tokens[:, 1:].masked_fill(ignored, -100).cuda()


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss as language models' scripts compute it."""
    return F.cross_entropy(logits.float().view(-1, WORDS), labels.reshape(-1), label_smoothing=0.1)


def train(model: Any, steps: int, samples: int) -> list[Tensor]:
    """An ordinary loop; its losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        tokens, labels = batch(samples - step % 2, step)
        loss = loss_of(model(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("cards", COUNTS)
@pytest.mark.parametrize("graphs", ["off", "auto"])
@pytest.mark.filterwarnings("ignore:calls of the module run without CUDA graphs")
def test_a_loop_with_its_loss_outside_trains_as_on_one_card(cards: int, graphs: str) -> None:
    alone, together = twins(cards, graphs=graphs if cards > 1 else "off", outputs="spread")
    expected, found = train(alone, 6, 8 * cards), train(together, 6, 8 * cards)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-4, atol=1e-4)
    for (name, mine), theirs in zip(alone.named_parameters(), together.module.parameters(), strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}")


def _peaks(cards: int, outputs: str, samples: int) -> list[int]:
    """The peak memory of each card in steps after the first, without what each holds between steps."""
    torch.manual_seed(0)
    model = mc.DataParallel(Words().cuda(), device_ids=list(range(cards)), outputs=outputs)
    peaks, held = [0] * cards, [0] * cards
    for step in range(4):
        tokens, labels = batch(samples, step)
        if step == 1:
            for card in range(cards):
                torch.cuda.synchronize(card)
                torch.cuda.reset_peak_memory_stats(card)
                held[card] = torch.cuda.memory_allocated(card)
        loss_of(model(tokens), labels).backward()
        model.zero_grad()
    for card in range(cards):
        torch.cuda.synchronize(card)
        peaks[card] = torch.cuda.max_memory_allocated(card) - held[card]
    del model, tokens, labels
    gc.collect()
    return peaks


@needs_two
@pytest.mark.parametrize("cards", SEVERAL)
def test_every_card_holds_its_own_logits_and_no_others(cards: int) -> None:
    """Report kind dp-imbalance: the first card holds everybody's outputs. Logits are 64 MiB a card, in fp32."""
    spread, gathered = _peaks(cards, "auto", 16 * cards), _peaks(cards, "gathered", 16 * cards)
    assert max(spread) <= 1.15 * min(spread), f"{spread} spread, {gathered} gathered"
    assert max(spread) <= (0.75 if cards == 2 else 0.5) * max(gathered), f"{spread} spread, {gathered} gathered"


@needs_two
@pytest.mark.parametrize("cards", SEVERAL)
def test_large_outputs_stay_and_gather_themselves(cards: int) -> None:
    alone, together = twins(cards)
    tokens, labels = batch(16 * cards)
    with torch.no_grad():
        mine, theirs = alone(tokens), together(tokens)
        assert isinstance(theirs, SpreadTensor)
        assert {part.device.index for part in theirs.held.parts} == set(range(cards))
        right = (theirs.argmax(-1) == labels).sum()
        assert theirs.held.spread
        assert right == (mine.argmax(-1) == labels).sum()
        torch.testing.assert_close(theirs.cpu(), mine.cpu(), rtol=1e-4, atol=1e-4)
        assert theirs.held.spread, "a copy to the host gathers nothing on a card"
        torch.testing.assert_close(theirs @ theirs.mT, mine @ mine.mT, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(theirs[1], mine[1], rtol=1e-4, atol=1e-4)
        assert not theirs.held.spread


@needs_two
def test_backward_passes_do_not_wait_for_one_another() -> None:
    """Losses, hooks and penalties in one graph, also from another thread and on a stream of the script's own."""
    alone, together = twins(2, outputs="spread")
    tokens, labels = batch(6)

    def work(model: Any) -> None:
        logits = model(tokens)
        logits.register_hook(lambda gradient: gradient * 2)
        (loss_of(logits, labels) + logits.square().mean() + F.mse_loss(logits.tanh(), logits.sigmoid())).backward()

    def on_a_stream(model: Any) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work(model)
        torch.cuda.current_stream().wait_stream(stream)

    for model in (alone, together):
        work(model)
        thread = threading.Thread(target=work, args=(model,))
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        on_a_stream(model)
    torch.cuda.synchronize()
    for mine, theirs in zip(alone.parameters(), together.module.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, mine.grad, rtol=1e-3, atol=1e-5)


@needs_two
def test_from_one_card_to_a_module_whose_primary_is_another() -> None:
    """Wholes on card 1, after much work queued there, go to card 0 as inputs that need gradients."""
    torch.manual_seed(0)
    body, head = nn.Linear(64, 4096).cuda(), nn.Linear(4096, 8).cuda()
    first = mc.DataParallel(copy.deepcopy(body), device_ids=[0, 1], output_device=1)
    second = mc.DataParallel(copy.deepcopy(head), device_ids=[0, 1])
    x = torch.randn(64, 64, device="cuda:0")
    late = torch.randn(4096, 4096, device="cuda:1")
    for _ in range(20):
        late = late @ late / 4096
    second(first(x) + late[0] * 0).square().mean().backward()
    head(body(x)).square().mean().backward()
    for mine, theirs in zip(
        [*body.parameters(), *head.parameters()], [*first.parameters(), *second.parameters()], strict=True
    ):
        torch.testing.assert_close(theirs.grad, mine.grad, rtol=1e-3, atol=1e-5)


class OnTheHost(nn.Module):
    """Gives its output on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(64, 4096)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x).cpu()


@needs_two
@pytest.mark.parametrize("graph", [True, False])
def test_a_large_output_on_the_host_is_one_tensor_of_the_output_card(graph: bool) -> None:
    torch.manual_seed(0)
    alone = OnTheHost().cuda()
    together = mc.DataParallel(copy.deepcopy(alone), device_ids=[0, 1])
    x = torch.randn(4096, 64, device="cuda:0")
    with torch.set_grad_enabled(graph):
        found = together(x)
    assert not isinstance(found, SpreadTensor)
    assert found.device == torch.device("cuda:0")
    torch.testing.assert_close((found + x[:, :1]).cpu(), alone(x) + x[:, :1].cpu(), rtol=1e-4, atol=1e-4)
    if graph:
        found.sum().backward()


class Columns(nn.Module):
    """Works on columns, of which each card gets some."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@needs_two
@pytest.mark.parametrize("graph", [True, False])
def test_an_output_that_the_next_module_cuts_otherwise_is_whole_before_it_is_read(graph: bool) -> None:
    """It is put together for the primary's own stream. It has 1 GiB, which takes longer than to queue what reads it."""
    torch.manual_seed(0)
    body = nn.Linear(64, 16384).cuda()
    first = mc.DataParallel(copy.deepcopy(body), device_ids=[0, 1], outputs="spread")
    second = mc.DataParallel(Columns().cuda(), device_ids=[0, 1], dim=1)
    with torch.set_grad_enabled(graph):
        for _ in range(4):  # memory that is read too early holds the whole of the call before
            x = torch.randn(16384, 64, device="cuda:0")
            found = second(first(x)).detach().cpu()
            torch.testing.assert_close(found, (body(x) * 2).detach().cpu(), rtol=1e-3, atol=1e-3)
            del found


@needs_two
def test_a_gradient_penalty_through_a_spread_output() -> None:
    alone, together = twins(2, outputs="spread")
    tokens, labels = batch(4)
    for model in (alone, together):
        weight = next(parameter for name, parameter in model.named_parameters() if name.endswith("head.weight"))
        loss = loss_of(model(tokens), labels)
        (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
        (loss + slope.square().sum()).backward()
    for mine, theirs in zip(alone.parameters(), together.module.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, mine.grad, rtol=1e-3, atol=1e-5)


@needs_two
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_and_a_scaler(dtype: torch.dtype) -> None:
    _, together = twins(2, outputs="spread")
    optimizer = torch.optim.AdamW(together.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
    losses = []
    for _ in range(20):
        tokens, labels = batch(8)
        with torch.autocast("cuda", dtype=dtype):
            logits = together(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        assert isinstance(logits, SpreadTensor)
        assert logits.held.spread
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
