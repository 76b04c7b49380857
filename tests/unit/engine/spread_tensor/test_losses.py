"""Losses of spread outputs: equal to plain PyTorch's to 1e-9, values and gradients, and computed on the parts."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manycard as mc
from manycard.engine.spread_tensor import SpreadTensor
from tests.unit.engine.twins import CARDS, close, same_state, twins

from .models import WORDS, Words, batch, compare, is_spread, labels, numbers

WEIGHT = torch.tensor([0.2, 3.0, 1.0, 0.5, 2.0], dtype=torch.float64)


def words(logits: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, WORDS), labels(len(logits)).view(-1), **options)


@pytest.mark.parametrize("cards", CARDS)
@pytest.mark.parametrize("samples", [1, 2, 3, 7, 8])
def test_a_language_models_loss(cards: int, samples: int) -> None:
    compare(words, samples, cards)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("ignored", [0.0, 0.6])
def test_cross_entropy_divides_by_what_counts(
    reduction: str, smoothing: float, weight: Tensor | None, ignored: float
) -> None:
    """Report kind token weights: a mean of the cards' means is not the mean over tokens."""

    def loss(logits: Tensor) -> Tensor:
        targets = labels(len(logits), ignored)
        options = {"weight": weight, "label_smoothing": smoothing, "reduction": reduction}
        return F.cross_entropy(logits.transpose(1, 2), targets, **options)  # type: ignore[arg-type]

    compare(loss)


def test_a_card_all_of_whose_targets_are_ignored_adds_nothing() -> None:
    def loss(logits: Tensor) -> Tensor:
        targets = labels(len(logits))
        targets[:4] = 3
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=3, label_smoothing=0.1)

    compare(loss)


def test_nothing_but_ignored_targets_gives_what_pytorch_gives() -> None:
    alone, together = twins(Words, outputs="spread")
    for model in (alone, together):
        logits = model(batch(7)).flatten(0, 1)
        assert F.cross_entropy(logits, torch.full((28,), -100)).isnan()
        assert F.cross_entropy(logits, torch.full((28,), -100), reduction="sum") == 0


def test_class_weights_as_many_as_samples_are_no_samples() -> None:
    compare(lambda logits: F.cross_entropy(logits[:, 0], labels(5)[:, 0], weight=WEIGHT), samples=5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_with_probabilities(reduction: str) -> None:
    def loss(logits: Tensor) -> Tensor:
        targets = numbers(len(logits)).softmax(-1)
        return F.cross_entropy(logits.view(-1, WORDS), targets.view(-1, WORDS), WEIGHT, reduction=reduction)

    compare(loss)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nll_loss_of_log_softmax(reduction: str) -> None:
    def loss(logits: Tensor) -> Tensor:
        chances = logits.log_softmax(-1).flatten(0, 1)
        return F.nll_loss(chances, labels(len(logits), 0.5).flatten(), WEIGHT, reduction=reduction)

    compare(loss)


LOSSES: dict[str, Any] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth l1": lambda y, t, **rest: F.smooth_l1_loss(y, t, beta=0.4, **rest),
    "huber": lambda y, t, **rest: F.huber_loss(y, t, delta=0.3, **rest),
    "bce": lambda y, t, **rest: F.binary_cross_entropy(y.sigmoid(), t, **rest),
    "bce, weighted": lambda y, t, **rest: F.binary_cross_entropy(y.sigmoid(), t, WEIGHT, **rest),
    "bce with logits": F.binary_cross_entropy_with_logits,
    "bce with logits, weighted": lambda y, t, **rest: F.binary_cross_entropy_with_logits(
        y, t, pos_weight=WEIGHT, **rest
    ),
    "kl": lambda y, t, **rest: F.kl_div(y.log_softmax(-1), t.softmax(-1), **rest),
    "kl, logarithms": lambda y, t, **rest: F.kl_div(y.log_softmax(-1), t.log_softmax(-1), log_target=True, **rest),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_number_by_number(name: str, reduction: str) -> None:
    compare(lambda logits: LOSSES[name](logits, numbers(len(logits)), reduction=reduction))


def test_kl_div_by_batch() -> None:
    compare(lambda y: F.kl_div(y.log_softmax(-1), numbers(len(y)).softmax(-1), reduction="batchmean"))


def test_losses_as_modules_and_a_spread_target() -> None:
    compare(
        lambda logits: nn.CrossEntropyLoss(label_smoothing=0.1)(
            logits[:, :-1].flatten(0, 1), labels(7)[:, 1:].flatten()
        )
    )
    compare(lambda logits: nn.MSELoss()(numbers(7), logits))


@pytest.mark.parametrize("cards", CARDS)
def test_both_sides_spread_as_in_distillation(cards: int) -> None:
    alone, together = twins(Words, cards, outputs="spread")
    teachers = twins(Words, cards, outputs="spread")
    for model, teacher in zip((alone, together), teachers, strict=True):
        with torch.no_grad():
            wanted = (teacher(batch(7)) * 3).softmax(-1)
        logits = model(batch(7))
        F.kl_div(logits.log_softmax(-1), wanted, reduction="batchmean").backward()
        F.mse_loss(model(batch(7)), model(batch(7, 9))).backward()
        assert model is alone or cards == 1 or (is_spread(logits) and is_spread(wanted))
    same_state(alone, together)


def test_a_target_that_needs_a_gradient() -> None:
    alone, together = twins(Words, outputs="spread")
    found = []
    for model in (alone, together):
        target = numbers(7).requires_grad_()
        F.smooth_l1_loss(model(batch(7)), target).backward()
        found.append(target.grad)
    close(found[1], found[0])
    same_state(alone, together)


NOT_COVERED: dict[str, Any] = {
    "broadcast target": lambda y: F.mse_loss(y, numbers(1)),
    "no reduction": lambda y: F.mse_loss(y, numbers(len(y)), reduction="none"),
    "deprecated argument": lambda y: F.mse_loss(y, numbers(len(y)), size_average=False),
    "weights of samples": lambda y: F.binary_cross_entropy_with_logits(y, numbers(len(y)), numbers(len(y), 5)),
    "dimension of the samples elsewhere": lambda y: F.cross_entropy(y.permute(1, 2, 0), labels(len(y)).T),
    "another loss": lambda y: F.soft_margin_loss(y, numbers(len(y)).round() * 2 - 1),
}


@pytest.mark.filterwarnings("ignore:Using a target size", "ignore:size_average and reduce")
@pytest.mark.parametrize("name", NOT_COVERED)
def test_what_is_not_covered_is_computed_whole(name: str) -> None:
    compare(NOT_COVERED[name], stays=None)


def test_a_wrong_target_raises_what_pytorch_raises() -> None:
    _, together = twins(Words, outputs="spread")
    with pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(together(batch(7))[:, 0], torch.full((7,), 9))
    with pytest.raises(ValueError, match="Expected input batch_size"):
        F.cross_entropy(together(batch(7))[:, 0], torch.zeros(3, dtype=torch.long))
    with pytest.raises(TypeError, match="no_such_argument"):
        F.mse_loss(together(batch(7)), numbers(7), no_such_argument=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="not a valid value for reduction"):
        F.mse_loss(together(batch(7)), numbers(7), reduction="average")


# ---- the script's graph ------------------------------------------------------------------------------------------


def test_a_gradient_penalty_and_second_derivatives() -> None:
    alone, together = twins(Words, outputs="spread")
    for model in (alone, together):
        x = batch(7).requires_grad_()
        loss = words(model(x), label_smoothing=0.2)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
    same_state(alone, together)


def test_a_graph_is_kept_only_where_asked() -> None:
    alone, together = twins(Words, outputs="spread")
    for model in (alone, together):
        loss = words(model(batch(7)))
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    same_state(alone, together)


def test_several_losses_of_one_output_and_several_forwards() -> None:
    alone, together = twins(Words, outputs="spread")
    for model in (alone, together):
        first, second = model(batch(7)), model(batch(5, 4))
        total = words(first) + 0.5 * F.mse_loss(first.softmax(-1), numbers(7)) + first.square().mean() * 0.1
        (total + F.l1_loss(second, numbers(5))).backward()
        assert model is alone or (is_spread(first) and is_spread(second))
    same_state(alone, together)


def test_hooks_and_kept_gradients_of_outputs() -> None:
    alone, together = twins(Words, outputs="spread")
    seen: list[Any] = []
    for model in (alone, together):
        logits = model(batch(7))
        logits.retain_grad()
        logits.register_hook(lambda gradient: gradient * 2)
        loss = words(logits)
        (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
        loss.backward()
        seen.append((found + 0, logits.grad + 0))
        assert model is alone or isinstance(logits.grad, SpreadTensor)
    close(seen[1], seen[0])
    same_state(alone, together)


def test_accumulation_and_a_scaler() -> None:
    alone, together = twins(Words, outputs="spread")
    for model in (alone, together):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            scaler.scale(words(model(batch(7, step))) / 3).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
    same_state(alone, together)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_short_numbers_do_not_overflow(dtype: torch.dtype) -> None:
    """A sum over a card's tokens may be more than fp16 holds, and the mean is not."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    model = mc.DataParallel(Large(), device_ids="cpu:2", outputs="spread")
    x = torch.zeros(4000, 3, dtype=dtype)
    x[:, 0] = 100
    logits = model(x)
    loss = F.cross_entropy(logits, torch.ones(4000, dtype=torch.long))
    assert is_spread(logits)
    assert loss.dtype == dtype
    close(loss.detach(), torch.tensor(100, dtype=dtype))
    loss.backward()
    torch.testing.assert_close(model.module.scale.grad, torch.tensor(100, dtype=dtype), rtol=1e-2, atol=0)


def test_autocast_reaches_the_cards() -> None:
    alone, together = twins(Words, outputs="spread")
    losses = []
    for model in (alone.float(), together.float()):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch(8).float())
            losses.append(words(logits))
        assert logits.dtype == torch.bfloat16
        losses[-1].backward()
    assert losses[1].dtype == losses[0].dtype
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_without_gradients(mode: Any) -> None:
    alone, together = twins(Words, outputs="spread")
    found = []
    for model in (alone, together):
        with mode():
            logits = model(batch(7))
            right = (logits.argmax(-1) == labels(7)).sum()
            found.append((words(logits), right.item(), logits.topk(2, -1).indices[0, 0, 0].item()))
            assert model is alone or is_spread(logits)
    close(found[1], found[0])


def test_a_loss_in_the_backward_pass_of_another_thread() -> None:
    alone, together = twins(Words, outputs="spread")
    for model in (alone, together):
        thread = threading.Thread(target=words(model(batch(7))).backward)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
    same_state(alone, together)
