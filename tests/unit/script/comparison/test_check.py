"""What a comparison with one card finds: the right layout, or the reason why there is none."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from manycard.cards import choose_cards
from manycard.engine.calls.spreader import Spreader
from manycard.script.comparison.check import Verdict, find_layout
from manycard.script.comparison.layout import ByTensor, Mean, Rows, TimeFirst
from manycard.script.comparison.rules import CountedMean
from manycard.script.ranks.parts import InTurn

CARDS = choose_cards("cpu:2").cards
KEPT: list[Tensor] = []


class Calls(nn.Module):
    """A linear layer and whatever a function makes of it."""

    def __init__(self, function: Any, features: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(features, 3)
        self.register_buffer("total", torch.zeros(3))
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def verdict(function: Any, *args: Any, features: int = 4, **kwargs: Any) -> Verdict:
    torch.manual_seed(0)
    return find_layout(Calls(function, features), CARDS, args, kwargs)


def stores(self: Any, x: Tensor) -> Tensor:
    self.seen = self.layer(x)
    return self.seen.sum(1)


def leaks(self: Any, x: Tensor) -> Tensor:
    KEPT.append(self.layer(x))
    KEPT.append(KEPT[-1].relu())
    KEPT.append(KEPT[-1].tanh())
    return KEPT[-1].sum(1)


def counts(self: Any, x: Tensor) -> Tensor:
    self.total += x.sum(0)[:3].detach()
    return self.layer(x)


def writes(self: Any, x: Tensor) -> Tensor:
    x.mul_(2)
    return self.layer(x)


def prints(self: Any, x: Tensor) -> Tensor:
    print(len(x))
    return self.layer(x)


def permutes(self: Any, x: Tensor) -> Tensor:
    return self.layer(x[torch.randperm(len(x))])


def test_the_batch_is_the_first_dimension() -> None:
    found = verdict(lambda self, x: self.layer(x), torch.randn(8, 4))
    assert found.layout is not None
    assert (found.layout.cut, found.layout.rules) == (ByTensor((0,)), (Rows(0),))
    assert not found.draws


def test_a_sequence_as_long_as_the_batch_is_told_from_it_by_values() -> None:
    found = verdict(lambda self, x: self.layer(x.cumsum(0)), torch.randn(6, 6, 4))
    assert found.layout is not None
    assert found.layout.cut == ByTensor((1,))


def test_time_first_rows_are_told_from_sample_first_rows() -> None:
    found = verdict(lambda self, x: self.layer(x.cumsum(0)).view(-1, 3), torch.randn(5, 6, 4))
    assert found.layout is not None
    assert found.layout.rules == (TimeFirst(0),)


def test_a_mask_that_is_no_part_of_the_batch_stays_whole() -> None:
    def attend(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        return (x @ x.transpose(1, 2) + mask).softmax(-1) @ self.layer(x)

    found = verdict(attend, torch.randn(5, 5, 4), torch.randn(5, 5))
    assert found.layout is not None
    assert found.layout.cut == ByTensor((0, None))


def test_a_mean_loss_inside() -> None:
    found = verdict(lambda self, x, y: F.cross_entropy(self.layer(x), y), torch.randn(9, 4), torch.arange(9) % 3)
    assert found.layout is not None
    assert found.layout.rules[0] == Mean() or "CountedMean" in str(found.layout.rules[0])


def steps_of_diffusion(self: Any, x: Tensor) -> Tensor:
    """A time step of each sample's own, by which a table is read and noise is scaled."""
    t = torch.randint(0, 10, (len(x),))
    table = torch.linspace(0, 1, 10, dtype=x.dtype)
    return self.layer(x * table[t, None] + torch.randn_like(x) * (1 - table[t, None])).square().mean()


def of_tokens(self: Any, x: Tensor) -> Tensor:
    """Half of the tokens, the same ones of all samples."""
    return self.layer(x[:, torch.randperm(x.shape[1])[: x.shape[1] // 2]]).sum((1, 2))


def of_each_ones_tokens(self: Any, x: Tensor) -> Tensor:
    kept = torch.rand(x.shape[:2]).argsort(1)[:, :2]
    return self.layer(x.gather(1, kept[..., None].expand(-1, -1, x.shape[2]))).sum((1, 2))


def flattened_time_first(self: Any, x: Tensor) -> Tensor:
    rows = x.transpose(0, 1).flatten(0, 1)
    return self.layer(rows + torch.randn_like(rows)).view(x.shape[1], x.shape[0], -1).transpose(0, 1)


def noisy_weights(self: Any, x: Tensor) -> Tensor:
    """Noise of the weights, which all samples share, and of each sample."""
    noise = torch.randn(3, 4, dtype=x.dtype) @ torch.randn(4, 4, dtype=x.dtype)
    return F.linear(x, self.layer.weight + noise) + torch.randn(len(x), 1, dtype=x.dtype)


def actions(self: Any, x: Tensor) -> Tensor:
    scores = self.layer(x)
    return scores.gather(1, torch.multinomial(scores.softmax(1), 1))


WHOLE_NUMBERS = [
    (steps_of_diffusion, (8, 4)),
    (lambda self, x: self.layer(x) * torch.empty(len(x), 1, dtype=torch.long).random_(0, 5), (8, 4)),
    (lambda self, x: self.layer(x) * torch.randint_like(x[:, :1], 5), (8, 4)),
    (lambda self, x: self.layer(x) * int(torch.randint(1, 5, ())), (8, 4)),
    (lambda self, x: self.layer(x) * int(torch.randint(1, 5, (1,))), (2, 4)),
    (lambda self, x: self.layer(x) * torch.empty(len(x), 1, dtype=torch.bool).bernoulli_(0.5), (8, 4)),
    (of_tokens, (8, 6, 4)),
    (of_each_ones_tokens, (8, 6, 4)),
    (flattened_time_first, (6, 5, 4)),
    (actions, (8, 4)),
    (noisy_weights, (13, 4)),
    (noisy_weights, (4, 4)),
]


@pytest.mark.parametrize(("function", "shape"), WHOLE_NUMBERS)
@pytest.mark.parametrize("in_parts", [Spreader, InTurn], ids=["cards", "ranks"])
def test_draws_of_whole_numbers_and_choices_are_pinned_by_sample(function: Any, shape: Any, in_parts: Any) -> None:
    torch.manual_seed(0)
    found = find_layout(Calls(function), CARDS, (torch.randn(*shape),), {}, in_parts=in_parts)
    assert found.layout is not None, found.reason
    assert found.draws


def group_means(numbers: Any) -> Any:
    """What each sample draws decides which others it is averaged with."""

    def forward(self: Any, x: Tensor) -> Tensor:
        group = numbers(len(x))
        y = self.layer(x)
        members = F.one_hot(group, 3).to(y.dtype)
        return (members.T @ y) / members.sum(0).clamp_min(1)[:, None]

    return forward


def negatives(self: Any, x: Tensor) -> Tensor:
    return (self.layer(x) - self.layer(x[torch.randint(0, len(x), (len(x),))])).square().sum(1)


def back_and_forth(self: Any, x: Tensor) -> Tensor:
    order = torch.randperm(len(x))
    return self.layer(x + x[order][order])


def there_and_back(self: Any, x: Tensor) -> Tensor:
    order = torch.randperm(len(x))
    return self.layer(x[order])[order.argsort()]


COUPLED = {
    "permuted": permutes,
    "permuted_twice": back_and_forth,
    "permuted_by_sorting": lambda self, x: self.layer(x + x[torch.rand(len(x)).argsort()]),
    "mixed": lambda self, x: self.layer(x + 0.5 * x[torch.randperm(len(x))]).square().mean(),
    "negatives": negatives,
    "one_for_all": lambda self, x: self.layer(x - x[torch.randint(0, len(x), ())]),
    "half_of_them": lambda self, x: self.layer(x[torch.randperm(len(x))[: len(x) // 2]]).mean(),
    "chosen_by_weight": lambda self, x: self.layer(x[torch.multinomial(x[:, 0].exp(), 3)]).mean(),
    "shuffled_by_python": lambda self, x: self.layer(x + x[random.sample(range(len(x)), len(x))]),
    "shuffled_by_numpy": lambda self, x: self.layer(x + x[np.random.permutation(len(x))]),
    "grouped": group_means(lambda n: torch.randint(0, 3, (n,))),
    "grouped_by_weight": group_means(lambda n: torch.multinomial(torch.ones(n, 3), 1).flatten()),
    "grouped_by_fraction": group_means(lambda n: (torch.rand(n) * 3).long()),
}


@pytest.mark.parametrize(("samples", "in_parts"), [(2, Spreader), (9, Spreader), (8, InTurn)])
@pytest.mark.parametrize("name", COUPLED)
def test_draws_that_couple_samples_are_found_out(name: str, samples: int, in_parts: Any) -> None:
    if samples == 2 and name in ("permuted_twice", "chosen_by_weight"):
        samples = 6  # twice is back again, and three can't be chosen from two
    torch.manual_seed(0)
    found = find_layout(Calls(COUPLED[name]), CARDS, (torch.randn(samples, 4),), {}, in_parts=in_parts)
    assert found.layout is None
    assert found.reason


def test_an_order_that_is_undone_couples_nothing() -> None:
    """As in shuffled BatchNorm, set aside here: each row comes back to its place."""
    found = verdict(there_and_back, torch.randn(8, 4))
    assert found.layout is not None
    assert found.draws


def test_draws_inside_a_checkpoint_are_drawn_again_alike() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return checkpoint(steps_of_diffusion, self, x, use_reentrant=False)

    found = verdict(forward, torch.randn(8, 4))
    assert found.layout is not None, found.reason
    assert found.draws


def test_a_rule_that_fits_values_only_gives_way_to_one_that_fits_gradients() -> None:
    """All logits are zero, so that every mean of the losses is log(7); the labels of one token a row are padding."""

    def bigram(self: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.table[x]
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1)

    torch.manual_seed(0)
    module = Calls(bigram)
    module.table = nn.Parameter(torch.zeros(7, 7))
    x, y = torch.randint(0, 7, (8, 5)), torch.randint(0, 7, (8, 5))
    for row in range(8):
        y[row, 1 + row // 2 :] = -1
    for in_parts in (Spreader, InTurn):
        found = find_layout(module, CARDS, (x, y), {}, in_parts=in_parts)
        assert found.layout is not None, found.reason
        assert found.layout.rules == (Rows(0), CountedMean(1, -1, shifted=False))


def test_draws_are_noticed_and_pinned() -> None:
    for function in (
        lambda self, x: self.layer(x + torch.randn_like(x)),
        lambda self, x: F.dropout(self.layer(x), 0.5),
        lambda self, x: self.layer(x) * (random.random() < 2) * random.random(),
        lambda self, x: self.layer(x) * float(np.random.rand()),
    ):
        found = verdict(function, torch.randn(8, 4))
        assert found.layout is not None
        assert found.draws


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda self, x: self.layer(x).softmax(0), "changes output 0"),
        (lambda self, x: torch.cdist(self.layer(x), self.layer(x)).mean(), "changes output 0"),
        (lambda self, x: self.layer(x - x.mean(0)), "changes output 0"),
        (lambda self, x: self.layer(x).sum() / 7 * len(x), "changes output 0"),
        (stores, "forward keeps what it sees of the batch in Calls.seen"),
        (leaks, "forward leaves tensors outside the module"),
        (counts, "forward computes buffer total from the whole batch"),
        (writes, "forward writes into its input"),
        (prints, "forward prints what it sees of the batch"),
        (permutes, "and forward draws a permutation"),
    ],
    ids=["softmax", "pairs", "centred", "odd", "attribute", "global", "buffer", "in_place", "prints", "permutes"],
)
def test_what_cutting_would_change_is_refused(function: Any, reason: str) -> None:
    found = verdict(function, torch.randn(8, 4))
    assert found.layout is None
    assert reason in found.reason
    assert not KEPT


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda self, x: self.layer(x).view(8, -1), "forward gives a tensor a fixed size"),
        (lambda self, x: self.layer(x) + torch.ones(8, 3), "doesn't fit what it meets in forward"),
        (lambda self, x: self.layer(x)[torch.arange(7, -1, -1)], "uses indices that reach beyond its part"),
        (lambda self, x: F.cross_entropy(self.layer(x), torch.arange(8) % 3), "doesn't fit what it meets in forward"),
    ],
)
def test_shapes_that_fit_the_whole_batch_only_are_told_in_words(function: Any, reason: str) -> None:
    found = verdict(function, torch.randn(8, 4))
    assert found.layout is None
    assert found.reason.startswith("it can't be cut: ")
    assert reason in found.reason


class Full(nn.Module):
    """A module that finds no memory for more than some samples."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.layer(x)


def test_a_comparison_that_finds_no_memory_looks_at_fewer_samples() -> None:
    for most in (8, 7, 3, 2):
        found = find_layout(Full(most), CARDS, (torch.randn(8, 4),), {})
        assert found.layout is not None, most
        assert found.layout.rules == (Rows(0),)
    found = find_layout(Full(1), CARDS, (torch.randn(8, 4),), {})
    assert (found.layout, found.reason) == (None, "the card has no memory left to compare with")


def test_what_was_right_goes_on_where_no_memory_is_left_to_compare_again() -> None:
    known = find_layout(Full(8), CARDS, (torch.randn(8, 4),), {}).layout
    assert known is not None
    again = find_layout(Full(1), CARDS, (torch.randn(8, 4),), {}, known)
    assert (again.layout, again.reason) == (known, "")
    again = find_layout(Full(3), CARDS, (torch.randn(8, 4),), {}, known)
    assert (again.layout, again.draws) == (known, False)


def test_fewer_samples_of_a_layout_that_is_known() -> None:
    """The likeliest dimension has more rows than the one that counts samples."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if torch.get_default_dtype() is torch.float64 and x.shape[1] > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.layer(x.cumsum(0)).sum(0)

    module, x = Calls(forward), torch.randn(20, 4, 4)
    module.most = 4
    known = find_layout(module, CARDS, (x,), {}).layout
    assert known is not None
    assert known.cut == ByTensor((1,))
    module.most = 3
    assert find_layout(module, CARDS, (x,), {}, known) == Verdict(known)


def test_a_small_difference_is_no_rounding() -> None:
    """The loss differs by 1e-6 only, which in fp32 would pass for another order of summation."""
    found = verdict(lambda self, x: self.layer(x).mean() * (1 + 1e-6 * x.std(0).mean()), torch.randn(8, 4))
    assert found.layout is None
    assert "changes output 0" in found.reason


def test_a_gradient_that_would_differ_is_found_though_values_agree() -> None:
    class Surprise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.samples = len(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * ctx.samples

    found = verdict(lambda self, x: Surprise.apply(self.layer(x)), torch.randn(8, 4))
    assert found.layout is None
    assert "changes the gradient of layer." in found.reason


def test_nothing_of_the_scripts_is_touched() -> None:
    torch.manual_seed(5)
    module = Calls(lambda self, x: F.dropout(self.layer(x), 0.3))
    x = torch.randn(8, 4, requires_grad=True)
    state, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    assert find_layout(module, CARDS, (x,), {}).layout is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    assert np.random.get_state()[1].tolist() == numpy
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    assert x.grad is None
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.get_default_dtype() == torch.float32


def test_a_module_that_needs_fp32_is_compared_in_fp32() -> None:
    found = verdict(lambda self, x: self.layer(x.float().to(self.layer.weight.dtype).float()), torch.randn(8, 4))
    assert found.layout is not None


def test_a_module_that_raises_is_left_to_raise_by_itself() -> None:
    def fail(self: Any, x: Tensor) -> Tensor:
        raise KeyError("no such word")

    found = verdict(fail, torch.randn(8, 4))
    assert found.layout is None
    assert "KeyError" in found.reason
