"""CUDA graphs of a module's calls in ordinary loops, on real cards: the numbers of eager calls, reasons in words."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manycard as mc
from manycard.errors import GraphError
from tests.gpu.convolutional import Net

COUNTS = [count for count in (1, 2, 4, 8) if count <= torch.cuda.device_count()] or [1]
MOST = COUNTS[-1]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA cards")
Loop = Callable[[Any], list[Any]]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(24, 16, num_layers=2, batch_first=True)
        self.last = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(x.flatten(2).transpose(1, 2).reshape(len(x), 8, 24))[0][:, -1])


class Attention(nn.Module):
    """Gives a dict with the loss in it; a mask lies in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(32, 10)
        self.register_buffer("mask", torch.triu(torch.full((24, 24), float("-inf")), 1))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        y = self.last(self.layers(self.embed(x.flatten(1, 2)), mask=self.mask, is_causal=False).mean(1))
        return {"y": y} if labels is None else {"y": y, "loss": F.cross_entropy(y, labels)}


def batches(count: int, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(size, 3, 8, 8, generator=generator).cuda(),
            torch.randint(10, (size,), generator=generator).cuda(),
        )
        for _ in range(count)
    ]


def make(model: nn.Module, cards: int, graphs: str) -> Any:
    return mc.DataParallel(copy.deepcopy(model), device_ids=list(range(cards)), graphs=graphs)


def replays(model: Any) -> int:
    """How many calls were replayed."""
    return int(model._spreader.graphs.replays)


def outcome(model: nn.Module, loop: Loop, cards: int, graphs: str) -> tuple[list[Any], list[Tensor], Any]:
    torch.manual_seed(0)
    together = make(model, cards, graphs if cards > 1 else "off")
    given = loop(together)
    torch.cuda.synchronize()
    state = [tensor.detach().clone() for tensor in (*together.module.parameters(), *together.module.buffers())]
    return given, state, together


def compare(model: nn.Module, loop: Loop, cards: int, *, least: int = 8, tolerance: float = 1e-4) -> None:
    """A loop gives the same with graphs as without."""
    expected, wanted, _ = outcome(model, loop, cards, "off")
    actual, got, together = outcome(model, loop, cards, "on")
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    if cards > 1:
        assert replays(together) >= least


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)


def ordinary(
    optimizer: Callable[[Any], Any] = sgd, *, accumulate: int = 1, clip: float = 0.0, precision: Any = None
) -> Loop:
    def loop(model: Any) -> list[Tensor]:
        own, losses = optimizer(model), []
        for number, (x, labels) in enumerate(batches(16 * accumulate)):
            size = 11 if number % 7 == 5 else 16  # an uneven batch now and then
            with torch.autocast("cuda", precision, enabled=precision is not None):
                loss = F.cross_entropy(model(x[:size]).float(), labels[:size]) / accumulate
            loss.backward()
            losses.append(loss.detach())
            if number % accumulate == accumulate - 1:
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                own.step()
                own.zero_grad(set_to_none=number % 2 == 0)
        return losses

    return loop


@pytest.mark.parametrize("cards", COUNTS)
@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"clip": 0.5}], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_an_ordinary_loop_trains_as_without_graphs(cards: int, settings: dict[str, Any], fused: bool) -> None:
    compare(Net(), ordinary(**settings), cards)
    if fused:
        compare(Net(), ordinary(lambda m: torch.optim.AdamW(m.parameters(), 1e-3, fused=True), **settings), cards)


@pytest.mark.parametrize("cards", COUNTS)
def test_dropout_draws_as_without_graphs_and_anew_in_each_replay(cards: int) -> None:
    compare(Net(dropout=0.5), ordinary(), cards)

    def same_batch(model: Any) -> list[Tensor]:
        x, labels = batches(1)[0]
        losses = []
        for _ in range(16):
            loss = F.cross_entropy(model(x), labels)
            loss.backward()
            losses.append(loss.detach())
        return losses

    losses, _, _ = outcome(Net(dropout=0.5), same_batch, cards, "on")
    assert len({float(loss) for loss in losses}) == len(losses)


@pytest.mark.parametrize("cards", COUNTS)
@pytest.mark.parametrize("kind", [Net, Recurrent])
def test_autocast_to_bf16_trains_as_without_graphs(cards: int, kind: Any) -> None:
    compare(kind(), ordinary(precision=torch.bfloat16), cards, tolerance=2e-2)


@needs_two
def test_recurrent_layers_are_replayed() -> None:
    compare(Recurrent(), ordinary(), MOST)


@needs_two
def test_losses_inside_and_dicts_of_outputs_are_replayed() -> None:
    def loop(model: Any) -> list[Tensor]:
        own, kept = torch.optim.AdamW(model.parameters(), 1e-3), []
        for x, labels in batches(16):
            own.zero_grad()
            out = model(x, labels=labels)
            out["loss"].backward()
            own.step()
            kept += [out["loss"].detach(), out["y"].detach()]
        return kept

    compare(Attention(), loop, MOST)


@needs_two
def test_compiled_modules_are_replayed() -> None:
    def compiled(graphs: str) -> Any:
        torch.manual_seed(0)
        module = Net()
        module.compile()
        together = mc.DataParallel(module, device_ids=list(range(MOST)), graphs=graphs)
        return ordinary()(together), together

    expected, _ = compiled("off")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual, together = compiled("auto")
    said = [str(warning.message) for warning in caught if "without CUDA graphs" in str(warning.message)]
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    assert said or replays(together) >= 8


# ---- calls that overlap ----------------------------------------------------------------------------------------


def adversarial(model: Any) -> list[Tensor]:
    """A discriminator that sees two batches before one backward pass, and then a generator's images."""
    own, losses = sgd(model), []
    torch.manual_seed(5)
    generator = nn.Conv2d(3, 3, 1).cuda()
    other = torch.optim.SGD(generator.parameters(), 0.05)
    for x, labels in batches(16):
        own.zero_grad()
        other.zero_grad()
        fake = generator(x)
        loss = F.cross_entropy(model(x), labels) + F.cross_entropy(model(fake.detach()), labels)
        loss.backward()
        own.step()
        fooled = F.cross_entropy(model(fake), labels)
        fooled.backward()
        other.step()
        losses += [loss.detach(), fooled.detach()]
    return losses


def evaluated(model: Any) -> list[Tensor]:
    own, kept = sgd(model), []
    for number, (x, labels) in enumerate(batches(20)):
        own.zero_grad()
        y = model(x)
        with torch.no_grad():
            kept.append(model(x * 2))
        model.eval()
        kept.append(model(x[:6]).detach())
        model.train()
        if number % 4 == 3:
            continue  # no backward pass
        F.cross_entropy(y, labels).backward()
        own.step()
        kept.append(y.detach())
    return kept


def kept_graphs(model: Any) -> list[Tensor]:
    own, kept = sgd(model), []
    wanted = [parameter for name, parameter in model.named_parameters() if "unused" not in name]
    for number, (x, labels) in enumerate(batches(20)):
        own.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        if number == 9:
            loss.backward(retain_graph=True)
        if number == 14:
            gradients = torch.autograd.grad(loss, wanted, create_graph=True)
            loss = loss + sum(gradient.square().sum() for gradient in gradients)
        loss.backward()
        own.step()
        kept.append(loss.detach())
        del loss
    return kept


def on_another_stream(model: Any) -> list[Tensor]:
    """Calls now on one stream and now on another, backward with them."""
    own, kept, streams = sgd(model), [], [torch.cuda.Stream(), torch.cuda.current_stream()]
    for number, (x, labels) in enumerate(batches(20)):
        stream = streams[number % 3 != 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            own.zero_grad()
            loss = F.cross_entropy(model(x), labels)
            loss.backward()
            own.step()
        torch.cuda.current_stream().wait_stream(stream)
        kept.append(loss.detach().clone())
    return kept


@needs_two
@pytest.mark.parametrize("loop", [adversarial, evaluated, kept_graphs, on_another_stream])
def test_calls_that_overlap_or_differ_give_the_numbers_of_eager_ones(loop: Loop) -> None:
    compare(Net(), loop, MOST)


@needs_two
def test_the_script_may_keep_what_it_gets() -> None:
    def loop(model: Any) -> list[Tensor]:
        kept = []
        for x, labels in batches(14):
            model.zero_grad()
            y = model(x)
            F.cross_entropy(y, labels).backward()
            kept += [y.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]
        return kept

    compare(Net(), loop, MOST)


@needs_two
def test_parameters_written_before_backward_raise_what_pytorch_raises() -> None:
    model = make(Net(), MOST, "on")
    ordinary()(model)
    x, labels = batches(1)[0]
    for _ in range(3):
        loss = F.cross_entropy(model(x), labels)
        with torch.no_grad():
            model.module.last.weight.mul_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del loss


# ---- what stays eager, and memory ------------------------------------------------------------------------------


class Waiting(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if y.sum().item() > 1e6 else y


@needs_two
def test_waiting_for_the_card_in_forward_is_named_by_its_line() -> None:
    model = Waiting()
    with pytest.warns(UserWarning, match=r"calls of the module run without CUDA graphs: test_call_graphs\.py.*\.item"):
        actual, _, _ = outcome(model, ordinary(), MOST, "auto")
    expected, _, _ = outcome(model, ordinary(), MOST, "off")
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(GraphError, match="waits for the card"):
        outcome(model, ordinary(), MOST, "on")


@needs_two
@pytest.mark.parametrize("sizes", [[32], [32, 20, 32, 27]])
def test_memory_does_not_grow(sizes: list[int]) -> None:
    model = make(Net(dropout=0.1), MOST, "on")
    own = torch.optim.AdamW(model.parameters(), 1e-3)
    x, labels = batches(1, 32)[0]

    def steps(count: int) -> Tensor:
        for number in range(count):
            size = sizes[number % len(sizes)]
            own.zero_grad()
            loss = F.cross_entropy(model(x[:size]), labels[:size])
            loss.backward()
            own.step()
        torch.cuda.synchronize()
        return loss.detach()

    first = steps(100)
    before = [torch.cuda.memory_allocated(card) for card in range(MOST)]
    last = steps(300)
    after = [torch.cuda.memory_allocated(card) for card in range(MOST)]
    assert all(late <= early + 2**20 for late, early in zip(after, before, strict=True)), (before, after)
    assert float(last) < float(first)
    assert replays(model) > 300


@needs_two
def test_a_dropped_model_gives_its_memory_back() -> None:
    def use() -> None:
        model = make(Net(), MOST, "on")
        ordinary()(model)
        model.engine.close()

    use()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(0)
    for _ in range(3):
        use()
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated(0) <= before + 2**20
