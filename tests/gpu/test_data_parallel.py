"""The drop-in on real cards: values to 1e-4 in fp32, where tensors lie, memory, streams, and that nothing hangs."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manycard as mc
from tests.strategies.models import Net
from tests.unit.engine.twins import ordinary_loop

ROOT = Path(__file__).resolve().parents[2]
COUNTS = list(range(1, torch.cuda.device_count() + 1)) or [1]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA cards")


def twins(make: Any = Net, cards: int | list[int] | None = None, **options: Any) -> tuple[Any, Any]:
    """A module alone on the first card, and its twin over several."""
    torch.manual_seed(0)
    ids = list(range(cards)) if isinstance(cards, int) else cards
    alone = make()
    together = mc.DataParallel(copy.deepcopy(alone).to(f"cuda:{ids[0] if ids else 0}"), device_ids=ids, **options)
    return alone.cuda(), together


def close(actual: Any, expected: Any, name: str = "") -> None:
    """Equal to 1e-4, wherever it lies."""
    torch.testing.assert_close(
        actual, expected, rtol=1e-4, atol=1e-4, check_device=False, msg=lambda text: f"{name}: {text}"
    )


def same_state(alone: nn.Module, together: Any) -> None:
    """Parameters and gradients are equal."""
    for (name, mine), (_, theirs) in zip(alone.named_parameters(), together.module.named_parameters(), strict=True):
        close(theirs.detach(), mine.detach(), name)
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            close(theirs.grad, mine.grad, f"{name}.grad")


def batch(samples: int, seed: int = 1, device: str = "cuda:0") -> Tensor:
    """Random rows."""
    return torch.randn(samples, 6, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("cards", COUNTS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("where", ["cpu", "cuda:0"])
def test_an_ordinary_loop(cards: int, fused: bool, where: str) -> None:
    alone, together = twins(cards=cards)
    batches = [batch(samples, step) for step, samples in enumerate((16, 7, 2, 1, 16, 16))]
    mine, theirs = [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused) for model in (alone, together)]
    losses = ordinary_loop(alone, mine, batches)
    close(ordinary_loop(together, theirs, [x.to(where) for x in batches]), losses)
    same_state(alone, together)


@pytest.mark.parametrize("cards", COUNTS)
def test_a_gan_loop_and_a_gradient_penalty(cards: int) -> None:
    alone, together = twins(cards=cards)
    for model in (alone, together):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(4):
            x = batch(9, step).requires_grad_()
            first, second = model(x), model(batch(5, step + 20))
            (slope,) = torch.autograd.grad(first.sum(), x, create_graph=True)
            optimizer.zero_grad()
            (first.mean() + second.square().mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
            optimizer.step()
    same_state(alone, together)


@pytest.mark.parametrize("cards", COUNTS)
def test_two_backwards_input_gradients_and_autograd_grad(cards: int) -> None:
    alone, together = twins(cards=cards)
    results = []
    for model in (alone, together):
        x = batch(9).requires_grad_()
        y = model(x * 2)
        y.square().mean().backward(retain_graph=True)
        y.sin().mean().backward(retain_graph=True)
        results.append([x.grad.clone(), *torch.autograd.grad(y.sum(), list(model.parameters()))])
    close(results[1], results[0])
    same_state(alone, together)


@pytest.mark.parametrize("cards", COUNTS)
def test_fp16_with_a_scaler_of_the_scripts_own(cards: int) -> None:
    """Report kind clip-unscale, in the loop people write."""
    _, together = twins(cards=cards)
    optimizer = torch.optim.AdamW(together.parameters(), lr=3e-2)
    scaler = torch.amp.GradScaler("cuda")
    losses = []
    for _ in range(30):
        x = batch(32)
        with torch.autocast("cuda", dtype=torch.float16):
            y = together(x)
            loss = F.mse_loss(y, x[:, :3] * 0.5)
        assert y.dtype == torch.float16
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(together.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]


class Recurrent(nn.Module):
    """Two layers of LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(3, 5, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x.view(len(x), 2, 3))[0]


@pytest.mark.parametrize("cards", COUNTS)
def test_an_lstm_trains_without_the_warning_of_scattered_weights(cards: int) -> None:
    """Report kind dp-rnn."""
    alone, together = twins(Recurrent, cards)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in (alone, together):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                optimizer.zero_grad()
                model(batch(9, step)).square().mean().backward()
                optimizer.step()
    same_state(alone, together)


def test_the_default_is_every_card_and_outputs_on_the_first() -> None:
    alone, together = twins()
    y = together(batch(16))
    assert y.device == torch.device("cuda:0")
    close(y, alone(batch(16)))


@needs_two
def test_cards_may_be_named_in_another_order() -> None:
    """Report kind device-ids: works only if the first chosen id is 0."""
    alone, together = twins(cards=[1, 0])
    y = together(batch(7, device="cpu"))
    assert y.device == torch.device("cuda:1")
    assert all(parameter.device == y.device for parameter in together.parameters())
    close(y, alone(batch(7)))
    y.square().mean().backward()
    alone(batch(7)).square().mean().backward()
    same_state(alone, together)


@needs_two
def test_a_card_that_is_not_the_first_works_alone() -> None:
    alone, together = twins(cards=[1])
    y = together(batch(7, device="cpu"))
    assert y.device == torch.device("cuda:1")
    close(y, alone(batch(7)))


@needs_two
def test_outputs_come_where_they_are_asked_for() -> None:
    alone, together = twins(cards=2, output_device=1)
    y = together(batch(7))
    assert y.device == torch.device("cuda:1")
    F.mse_loss(y, batch(7, device="cuda:1")[:, :3]).backward()
    F.mse_loss(alone(batch(7)), batch(7)[:, :3]).backward()
    same_state(alone, together)


@needs_two
def test_outputs_in_rotation_visit_every_card() -> None:
    alone, together = twins(cards=2, output_device="rotate")
    where = set()
    for step in range(4):
        y = together(batch(7, step))
        where.add(y.device)
        close(y, alone(batch(7, step)))
        y.square().mean().backward()
        alone(batch(7, step)).square().mean().backward()
    assert len(where) == 2
    same_state(alone, together)


@pytest.mark.parametrize("cards", COUNTS)
def test_inputs_on_the_host_get_their_gradients(cards: int) -> None:
    """They are large, so that what is read before it has come is wrong."""
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(1 << 14, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()
    together = mc.DataParallel(copy.deepcopy(alone), device_ids=list(range(cards)))
    for step in range(3):
        x = torch.randn(2048, 1 << 14, generator=torch.Generator().manual_seed(step), requires_grad=True)
        together(x).square().sum().backward()
        own = x.detach().cuda().requires_grad_()
        alone(own).square().sum().backward()
        assert x.grad is not None
        assert own.grad is not None
        close(x.grad, own.grad.cpu())


class Wide(nn.Module):
    """Outputs that weigh much more than what they are computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 1 << 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x)


def _peaks(output_device: Any) -> list[int]:
    """The peak memory that each card's steps add, after the first, which shows `balanced` how full the cards are."""
    before = [torch.cuda.memory_allocated(card) for card in (0, 1)]
    together = mc.DataParallel(Wide().cuda(), device_ids=[0, 1], output_device=output_device, outputs="gathered")
    peaks = []
    for number in range(4):
        for card in (0, 1):
            torch.cuda.synchronize(card)
            torch.cuda.reset_peak_memory_stats(card)
        loss = together(batch(256, number)).square().mean()
        loss.backward()
        together.zero_grad()
        del loss
        peaks.append([torch.cuda.max_memory_allocated(card) for card in (0, 1)])
    return [max(of_card) - held for of_card, held in zip(zip(*peaks[2:], strict=True), before, strict=True)]


@needs_two
def test_balanced_outputs_weigh_less_on_the_fullest_card() -> None:
    """Report kind dp-imbalance: the first card holds everybody's outputs, beside the optimizer's state."""
    state = torch.empty(1 << 27, device="cuda:0")
    first = _peaks(0)
    gc.collect()
    balanced = _peaks("balanced")
    first[0] += state.nbytes
    balanced[0] += state.nbytes
    assert max(balanced) < 0.9 * max(first), f"{balanced} balanced, {first} on the first card"


@needs_two
def test_a_dropped_wrapper_frees_the_memory_of_every_card() -> None:
    def allocated() -> list[int]:
        gc.collect()
        for card in (0, 1):
            torch.cuda.synchronize(card)
        return [torch.cuda.memory_allocated(card) for card in (0, 1)]

    allocated()
    before = allocated()
    module = nn.Sequential(nn.Linear(6, 1 << 16), nn.Linear(1 << 16, 3)).cuda()
    together = mc.DataParallel(module, device_ids=[0, 1])
    together(batch(16)).sum().backward()
    assert allocated()[1] > before[1] + (1 << 20)
    del together, module
    after = allocated()
    assert after[0] <= before[0] + (1 << 16)
    assert after[1] <= before[1] + (1 << 16)


class Fails(Net):
    """Raises on the card that meets a flagged sample."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 100).any()):
            raise ValueError("no such word")
        return super().forward(x)


@needs_two
@pytest.mark.parametrize("card", [0, 1])
def test_an_exception_arrives_with_the_cards_name(card: int) -> None:
    alone, together = twins(Fails, 2)
    x = batch(8)
    x[4 * card] = 1000
    with pytest.raises(ValueError, match="no such word") as caught:
        together(x)
    assert f"cuda:{card}" in "".join(traceback.format_exception(caught.value))
    for model in (alone, together):
        model(batch(8)).square().mean().backward()
    same_state(alone, together)


@pytest.mark.parametrize("cards", COUNTS)
def test_work_on_a_stream_of_the_scripts_own(cards: int) -> None:
    """Long work goes before on the caller's stream, and reads follow it; nothing may be read too early."""
    alone, together = twins(cards=cards)
    stream = torch.cuda.Stream()
    big = torch.randn(4096, 4096, device="cuda:0")
    x = batch(16)
    expected = alone(x * 2 + 0)
    expected.square().mean().backward()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(3):
        together.zero_grad()
        with torch.cuda.stream(stream):
            late = big
            for _ in range(10):
                late = late @ big / 64
            given = x * 2 + late[0, 0] * 0
            y = together(given)
            y.square().mean().backward()
        stream.synchronize()
        close(y.detach(), expected.detach())
        same_state(alone, together)


@pytest.mark.parametrize("cards", COUNTS)
def test_a_stream_of_the_scripts_own_leaves_each_card_the_current_one(cards: int) -> None:
    class Making(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + torch.zeros(4, device="cuda")

    model = mc.DataParallel(Making().cuda(), list(range(cards)))
    with torch.cuda.stream(torch.cuda.Stream(0)):
        model(torch.randn(8, 4, device="cuda")).sum().backward()
    torch.cuda.synchronize()


@pytest.mark.parametrize("cards", COUNTS)
def test_batches_may_be_dropped_and_rewritten_at_once(cards: int) -> None:
    """The allocator must not give a batch's memory to others while a card still reads it."""
    alone, together = twins(cards=cards)
    expected = [alone(batch(512, seed)).detach() for seed in range(8)]
    outs = []
    for seed in range(8):
        x = batch(512, seed)
        outs.append(together(x).detach())
        x.fill_(float("nan"))
        del x
    for out, wanted in zip(outs, expected, strict=True):
        close(out, wanted)


def test_backward_from_another_thread() -> None:
    alone, together = twins()
    y = together(batch(16)).square().mean()
    thread = threading.Thread(target=y.backward)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    alone(batch(16)).square().mean().backward()
    same_state(alone, together)


@pytest.mark.parametrize("cards", COUNTS)
def test_the_callers_current_card_stays(cards: int) -> None:
    _, together = twins(cards=cards)
    last = torch.cuda.device_count() - 1
    with torch.cuda.device(last):
        together(batch(8)).sum().backward()
        assert torch.cuda.current_device() == last
    assert torch.cuda.current_device() == 0


CROSSING = """
import faulthandler, sys
import torch
from torch import nn
import manycard as mc
from manycard.errors import ManycardError

outside = nn.Linear(6, 6).cuda(0)
kept = torch.ones(6, device="cuda:0", requires_grad=True)

class Touches(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.line = nn.Linear(6, 6)
        self.how = how

    def forward(self, x):
        y = self.line(x)
        if self.how == "module":
            return y + outside(x.to("cuda:0")).to(x.device)
        if self.how == "tensor":
            return y + (x.to("cuda:0") * kept).to(x.device)
        return (y.to("cuda:0") * 2).to(x.device)

how = sys.argv[1]
torch.manual_seed(0)
alone = Touches(how).cuda()
torch.manual_seed(0)
together = mc.DataParallel(Touches(how).cuda(), device_ids=[0, 1])
x = torch.randn(8, 6, device="cuda:0")
faulthandler.dump_traceback_later(30, exit=True)
grads = []
try:
    for model in (alone, together):
        outside.zero_grad()
        kept.grad = None
        model(x).square().mean().backward()
        module = getattr(model, "module", model)
        others = [p.grad for p in outside.parameters()] + [kept.grad]
        grads.append([g.clone() for g in [*[p.grad for p in module.parameters()], *others] if g is not None])
except ManycardError as refused:
    print("refused:", refused)
    sys.exit(0)
torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-4)
print("right")
"""


@needs_two
@pytest.mark.parametrize("how", ["module", "tensor", "copy"])
def test_a_forward_that_touches_another_card_is_refused_or_right_within_30_seconds(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CROSSING, how], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(("refused:", "right"))
