"""What random operations give while they are pinned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manycard.script.comparison.pinned import PATTERNS, PinnedDraws, Way

X = torch.linspace(-1, 1, 24).reshape(6, 4)

DRAWS: dict[str, Callable[[int], Tensor]] = {
    "rand": lambda n: torch.rand(n, 3),
    "randn": lambda n: torch.randn(n, 3),
    "randint": lambda n: torch.randint(2, 9, (n, 3)),
    "randint_like": lambda n: torch.randint_like(X[:n], 9),
    "random": lambda n: torch.empty(n, 3, dtype=torch.long).random_(2, 9),
    "random_to": lambda n: torch.empty(n, 3).random_(9),
    "random_any": lambda n: torch.empty(n, dtype=torch.int16).random_(),
    "exponential": lambda n: torch.empty(n, 3).exponential_(),
    "multinomial": lambda n: torch.multinomial(torch.ones(n, 7), 3),
    "multinomial_with_replacement": lambda n: torch.multinomial(torch.ones(n, 7), 9, replacement=True),
    "flattened": lambda n: torch.rand(n * 3),
}


def _drawn(draw: Callable[[int], Tensor], samples: int, *part: int, way: Way = Way.SAMPLES, pattern: int = 0) -> Tensor:
    pinned = PinnedDraws(pattern)
    pinned.way = way
    if part:
        pinned.begin_part(*part)
    with pinned:
        value = draw(samples)
    assert pinned.drawn
    assert pinned.patterned
    return value


@pytest.mark.parametrize("inference", [False, True], ids=["training", "inference"])
@pytest.mark.parametrize("name", DRAWS)
def test_a_part_draws_what_its_samples_draw_on_one_card(name: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        whole = _drawn(DRAWS[name], 6)
        parts = [_drawn(DRAWS[name], 4, 0, 4, 6), _drawn(DRAWS[name], 2, 4, 2, 6)]
        assert torch.equal(whole, torch.cat(parts))
        assert whole.unique().numel() > 1
        assert any(not torch.equal(whole, _drawn(DRAWS[name], 6, pattern=other)) for other in range(1, PATTERNS))


def test_rows_of_time_and_sample_and_what_all_samples_share() -> None:
    flattened = DRAWS["flattened"]
    whole = _drawn(flattened, 6).reshape(3, 6)
    parts = [_drawn(flattened, 4, 0, 4, 6, way=Way.TIME_FIRST), _drawn(flattened, 2, 4, 2, 6, way=Way.TIME_FIRST)]
    assert torch.equal(whole, torch.cat([part.reshape(3, -1) for part in parts], dim=1))
    shared = [_drawn(lambda n: torch.rand(12), 0, start, 4, 8, way=Way.SHARED) for start in (0, 4)]
    assert torch.equal(*shared)
    by_rows = [_drawn(lambda n: torch.rand(12), 0, start, 4, 8, way=Way.ROWS) for start in (0, 4)]
    assert torch.equal(*by_rows)


@pytest.mark.parametrize("length", [2, 3, 8, 9])
def test_a_permutation_is_one_cycle(length: int) -> None:
    for pattern in range(PATTERNS):
        order = _drawn(torch.randperm, length, pattern=pattern).tolist()
        place, seen = order[0], 1
        while place:
            place, seen = order[place], seen + 1
        assert seen == length


def test_whole_numbers_and_choices_are_of_what_was_asked_for() -> None:
    assert set(_drawn(lambda n: torch.randint(2, 5, (n,)), 60).tolist()) == {2, 3, 4}
    weights = torch.tensor([0.0, 5.0, 0.0, 1.0]).expand(60, 4)
    chosen = _drawn(lambda n: torch.multinomial(weights[:n], 1), 60).flatten().tolist()
    assert set(chosen) == {1, 3}
    assert chosen.count(1) > chosen.count(3)
    both = _drawn(lambda n: torch.multinomial(weights[:n], 2), 60)
    assert both.sort(1).values.tolist() == [[1, 3]] * 60


@pytest.mark.parametrize("inference", [False, True], ids=["training", "inference"])
def test_what_is_dropped_is_nothing_and_what_flows_through_stays(inference: bool) -> None:
    kept: list[Callable[[], Tensor]] = [
        lambda: F.dropout(X, 0.5),
        lambda: F.dropout1d(X[None], 0.5)[0],
        lambda: torch.native_dropout(X, 0.5, True)[0],
        lambda: X.clone().bernoulli_(0.1) * X,
        lambda: (torch.zeros(6, 4, dtype=torch.bool).bernoulli_(0.1)) * X,
    ]
    for function in kept:
        pinned = PinnedDraws()
        with torch.inference_mode(inference), pinned:
            found = function()
        assert torch.allclose(found / found[0, 0], X / X[0, 0])  # some divide by the share that is kept
        assert pinned.drawn
        assert not pinned.patterned
    with torch.inference_mode(inference), PinnedDraws():
        assert torch.allclose(F.rrelu(X, 0.2, 0.4, training=True), F.leaky_relu(X, 0.3))


def test_a_random_slope_passes_gradients_back() -> None:
    x = X.clone().requires_grad_()
    with PinnedDraws():
        F.rrelu(x, 0.2, 0.4, training=True).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, torch.where(X > 0, 1.0, 0.3))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_draw_nothing(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    layer = kind(4, 3)
    with torch.inference_mode():
        expected = layer(X)[0]
        with PinnedDraws() as pinned:
            found = layer(X)[0]
    assert torch.equal(expected, found)
    assert not pinned.drawn
