"""Operations on spread outputs: equal to plain PyTorch's to 1e-9, and spread where they can be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manycard as mc
from manycard.engine.batches.input_copies import InputCopies
from manycard.engine.batches.joining import Concatenated
from manycard.engine.calls.output_leaf import OutputLeaf
from manycard.engine.spread_tensor import Held, Home
from tests.unit.engine.twins import CARDS, close, same_state, twins

from .models import TIMES, WORDS, Words, batch, compare, is_spread, numbers, plainly

STAYS: dict[str, Any] = {
    "view, merged": lambda y: y.view(-1, WORDS),
    "view, merged whole": lambda y: y.view(len(y), -1),
    "view, apart again": lambda y: y.view(-1, WORDS).view(-1, TIMES, WORDS),
    "view, other rows": lambda y: y.view(-1, 2, 2, WORDS).view(-1, 2 * WORDS),
    "view, in front": lambda y: y.view(1, -1, WORDS),
    "reshape of a slice": lambda y: y[:, :-1].reshape(-1, WORDS),
    "flatten": lambda y: y.flatten(0, 1),
    "unflatten": lambda y: y.unflatten(1, (2, 2)),
    "transpose": lambda y: y.transpose(1, 2),
    "transpose of the samples": lambda y: y.transpose(0, 1),
    "permute": lambda y: y.permute(2, 0, 1),
    "mT": lambda y: y.mT,
    "slices": lambda y: y[:, 1:, ::2],
    "slice of all samples": lambda y: y[:, -1],
    "ellipsis": lambda y: y[..., 0],
    "none": lambda y: y[:, None],
    "unsqueeze and squeeze": lambda y: y.unsqueeze(0).squeeze(0),
    "contiguous": lambda y: y.transpose(1, 2).contiguous(),
    "clone": lambda y: y.clone(),
    "float": lambda y: y.float().double(),
    "to": lambda y: y.to(torch.float32).to(torch.float64),
    "scalars": lambda y: (1 - y * 2 + 0.5) / 3,
    "a number in a tensor": lambda y: y * torch.tensor(0.5, dtype=torch.float64),
    "powers": lambda y: (y**2 + 1).sqrt().log(),
    "functions": lambda y: F.gelu(y).tanh() + F.silu(y) + F.relu(y) + y.exp().sigmoid() + F.softplus(y),
    "clamp": lambda y: y.clamp(-0.1, 0.1),
    "with each other": lambda y: y * y.softmax(-1) - y,
    "with a whole tensor": lambda y: (y - numbers(len(y))).abs() * numbers(len(y), 4),
    "with a row": lambda y: y + numbers(1)[0, 0],
    "with a column": lambda y: y * numbers(len(y))[:, :, :1],
    "with a mask": lambda y: torch.where(numbers(len(y)) > 0.5, y, 0.0),
    "masked fill": lambda y: y.masked_fill(numbers(len(y)) > 0.5, -1.0),
    "softmax": lambda y: y.softmax(-1) + y.log_softmax(1),
    "argmax": lambda y: y.argmax(-1),
    "maximum": lambda y: y.max(-1).values,
    "top": lambda y: y.topk(2, dim=-1).values,
    "sorted": lambda y: y.sort(1).values,
    "sums": lambda y: y.sum(-1) + y.mean(-1) + y.amax(2) + y.logsumexp(-1),
    "sum kept": lambda y: y / y.sum(1, keepdim=True),
    "sum of two": lambda y: y.sum((1, 2)),
    "sum of everything": lambda y: y.sum() * 0.1,
    "mean of everything": lambda y: y.square().mean(),
    "sum over samples": lambda y: y.sum(0) * y.sum((0, 2), keepdim=True),
    "chunks": lambda y: torch.cat([part.exp() for part in y.chunk(2, dim=1)], dim=1) * y.split([2, 3], -1)[0].sum(),
    "joined along another dimension": lambda y: torch.cat([y, numbers(len(y)), y * 2], dim=-1),
    "data": lambda y: (y.data.max(-1)[1] == 2).sum() + 0.5 * y.mean(),
    "comparisons": lambda y: ((y > 0) & (y < 0.5)).sum(),
    "zeros like it": lambda y: torch.zeros_like(y) + torch.full_like(y, 2),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_stays_spread(name: str) -> None:
    compare(STAYS[name])


@pytest.mark.parametrize("cards", CARDS)
@pytest.mark.parametrize("samples", [2, 5, 8])
def test_a_chain(cards: int, samples: int) -> None:
    def work(y: Tensor) -> Tensor:
        shifted = y[:, :-1].float().transpose(1, 2).contiguous().double()
        return (shifted.log_softmax(1) * numbers(samples)[:, 1:].transpose(1, 2)).view(samples, -1).sum(1)

    compare(work, samples, cards)


GATHERS: dict[str, Any] = {
    "samples apart": lambda y: y.view(2, 4, TIMES, WORDS),
    "one sample": lambda y: y[0],
    "some samples": lambda y: y[1:5],
    "every second sample": lambda y: y[::2],
    "chosen samples": lambda y: y[torch.tensor([3, 0])],
    "in another order": lambda y: y.flip(0),
    "over samples": lambda y: y.mean(0) + y.softmax(0)[0] + y.cumsum(0)[-1],
    "best sample": lambda y: y.argmax(0),
    "norm": lambda y: y.norm(),
    "matrix product": lambda y: y @ numbers(1)[0].T,
    "joined": lambda y: torch.cat([y, y]),
    "unbound": lambda y: torch.stack(list(y)),
    "einsum": lambda y: torch.einsum("btw,stw->bs", y, y),
    "gathered by index": lambda y: y.gather(2, torch.zeros(len(y), TIMES, 1, dtype=torch.long)),
    "dropout": lambda y: F.dropout(y, 0.0),
    "batch norm": lambda y: F.batch_norm(y, None, None, training=True),
    "linear": lambda y: F.linear(y, numbers(1)[0]),
}


@pytest.mark.parametrize("name", GATHERS)
def test_what_needs_the_whole(name: str) -> None:
    compare(GATHERS[name], samples=8, stays=None)


def test_rows_by_time_are_not_taken_for_rows_by_sample() -> None:
    compare(lambda y: y.transpose(0, 1).reshape(-1, WORDS) * numbers(7).transpose(0, 1).reshape(-1, WORDS), stays=None)


def test_a_view_read_alone_leaves_the_rest_spread() -> None:
    """A class token that goes to a head of the script's own is all that travels."""
    alone, together = twins(Words, outputs="spread")
    for model in (alone, together):
        torch.manual_seed(1)
        head = nn.Linear(WORDS, 2).double()
        y = model(batch(7))
        head(y[:, 0]).square().mean().backward()
        assert model is alone or is_spread(y)
        assert model is alone or y.held._copy is None, "all of it was gathered"
    same_state(alone, together)


def test_reading_all_of_it_leaves_the_loss_on_the_cards() -> None:
    alone, together = twins(Words, outputs="spread")
    for model in (alone, together):
        y = model(batch(7))
        y.norm().item()
        F.mse_loss(y, numbers(7)).backward()
        assert model is alone or is_spread(y)
    same_state(alone, together)


def test_a_scale_and_a_bias_of_the_scripts_own() -> None:
    alone, together = twins(Words, outputs="spread")
    found = []
    for model in (alone, together):
        scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        bias = nn.Parameter(torch.linspace(0, 1, WORDS, dtype=torch.float64))
        y = model(batch(7))
        F.mse_loss(y * scale.exp() + bias, numbers(7)).backward()
        found.append([scale.grad, bias.grad])
        assert model is alone or is_spread(y)
    close(found[1], found[0])
    same_state(alone, together)


def test_small_results_are_gathered_at_once() -> None:
    """`auto`: logits of 64 MiB stay on their cards, the classes found in them don't."""
    model = mc.DataParallel(nn.Linear(2, 1 << 20), device_ids="cpu:2")
    with torch.no_grad():
        large, small = model(torch.randn(16, 2)), model(torch.randn(4, 2))
    assert is_spread(large)
    assert type(small) is Tensor
    found = large.argmax(-1)
    assert type(found) is Tensor
    close(found, plainly(large).argmax(-1))


class Deep(nn.Module):
    """One linear layer of fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WORDS, WORDS)

    def forward(self, y: Tensor) -> Tensor:
        return self.layer(y) + y


@pytest.mark.parametrize("cards", CARDS)
@pytest.mark.parametrize("samples", [2, 7])
def test_from_one_spread_module_to_the_next(cards: int, samples: int) -> None:
    alone, together = twins(Words, cards, outputs="spread")
    heads = twins(Deep, cards, outputs="spread")
    found = []
    for model, head in zip((alone, together), heads, strict=True):
        y = model(batch(samples))
        y.retain_grad()
        z = head(y)
        F.mse_loss(z, numbers(samples)).backward()
        assert model is alone or cards == 1 or (is_spread(y) and is_spread(y.grad))
        found.append(plainly(y.grad))
        z = head(model(batch(samples)).flip(0))
        F.mse_loss(z, numbers(samples)).backward()
    close(found[1], found[0])
    same_state(alone, together)
    same_state(*heads)


def test_to_another_engine_of_other_cards() -> None:
    alone, together = twins(Words, 3, outputs="spread")
    heads = twins(Deep, 2, outputs="spread")
    for model, head in zip((alone, together), heads, strict=True):
        y = model(batch(7))
        (head(y) * y).sum().backward()
    same_state(alone, together)
    same_state(*heads)


@pytest.mark.parametrize("graph", [True, False])
def test_an_input_is_not_put_together_where_copies_run_apart(monkeypatch: pytest.MonkeyPatch, graph: bool) -> None:
    """The stream of those copies is one that the primary doesn't wait for."""
    apart, joined = InputCopies.apart, Held.joined
    inside, seen = [False], []

    @contextmanager
    def noted(copies: InputCopies) -> Iterator[None]:
        with apart(copies):
            inside[0] = True
            yield
            inside[0] = False

    def noting(held: Held, *args: Any, **options: Any) -> Tensor:
        seen.append(inside[0])
        return joined(held, *args, **options)

    _, first = twins(Words, 3, outputs="spread")
    _, second = twins(Deep, 2, outputs="spread")
    with torch.set_grad_enabled(graph):
        y = first(batch(7))
        monkeypatch.setattr(InputCopies, "apart", noted)
        monkeypatch.setattr(Held, "joined", noting)
        second(y)
    assert seen == [False]


@pytest.mark.parametrize("outputs", ["auto", "gathered"])
def test_outputs_may_be_gathered_at_once(outputs: str) -> None:
    _, together = twins(Words, outputs=outputs)
    assert type(together(batch(7))) is Tensor


def test_a_choice_that_there_is_not() -> None:
    with pytest.raises(mc.errors.SettingError, match=r"outputs.*here.*Fix: write auto, spread or gathered"):
        mc.DataParallel(Words(), device_ids="cpu:2", outputs="here")


def test_what_forward_has_moved_off_its_card_is_joined() -> None:
    _, together = twins(Words, 2, outputs="spread")
    engine = together.engine
    home = Home(engine.threads, engine.input_copies, 0, 0)
    for device, stays in (("cpu", True), ("meta", False)):
        parts = (torch.zeros(2, 3, device=device), torch.zeros(1, 3, device=device))
        leaf = OutputLeaf((0, 1), parts, Concatenated(0, (2, 1)))
        assert (leaf.left_spread(home, False) is not None) == stays


class Returns(nn.Module):
    """Returns what it holds or is given, and several things at once."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("last", torch.zeros(12, 6))

    def forward(self, x: Tensor) -> Any:
        self.last[: len(x)] = x.detach()
        return {"input": x, "view": x[:, 1:], "cache": self.last[: len(x)], "y": x * self.scale, "loss": self.scale * 2}


def test_outputs_that_share_memory_with_what_changes_later() -> None:
    _, together = twins(Returns, outputs="spread")
    x = batch(7)
    wanted = x.clone()
    out = together(x)
    together(batch(7, 5))
    x.zero_()
    close(plainly(out["input"]), wanted)
    close(plainly(out["view"]), wanted[:, 1:])
    close(plainly(out["cache"]), wanted)
    close(plainly(out["y"]), wanted * 2)
    assert type(out["loss"]) is Tensor


def test_images_in_channels_last() -> None:
    def made() -> nn.Module:
        return nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)

    alone, together = twins(made, outputs="spread")
    for model in (alone, together):
        x = torch.randn(7, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        y = model(x.to(memory_format=torch.channels_last))
        assert y.is_contiguous(memory_format=torch.channels_last)
        F.cross_entropy(y, torch.arange(7)[:, None, None].expand(7, 4, 4) % 5).backward()
        assert (y.exp() + 1).permute(0, 2, 3, 1).is_contiguous()
        assert model is alone or is_spread(y)
    same_state(alone, together)
