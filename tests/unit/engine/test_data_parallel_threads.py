"""The threads of `mc.DataParallel`: what follows into them, what comes out of them, and that they end."""

from __future__ import annotations

import contextvars
import gc
import os
import threading
import time
import traceback
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from manycard.errors import ManycardError
from tests.conftest import threads_left
from tests.strategies.models import Dropped, Net

from .twins import CARDS, batch, close, same_state, spread, twins

TAG: contextvars.ContextVar[str] = contextvars.ContextVar("tag", default="unset")
SEEN: list[dict[str, Any]] = []


class Observes(Net):
    """Notes the state of the thread it runs in."""

    def forward(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn("hello", UserWarning, stacklevel=1)
        made = torch.zeros(1)
        SEEN.append(
            {
                "grad": torch.is_grad_enabled(),
                "inference": torch.is_inference_mode_enabled(),
                "autocast": torch.is_autocast_enabled("cpu"),
                "autocast dtype": torch.get_autocast_dtype("cpu"),
                "autocast cache": torch.is_autocast_cache_enabled(),
                "dtype": made.dtype,
                "device": made.device.type,
                "tag": TAG.get(),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "warned": len(caught),
                "threads": torch.get_num_threads(),
            }
        )
        return super().forward(x)


def observed(together: Any, x: Tensor) -> list[dict[str, Any]]:
    """What the module sees when called alone, then on every card."""
    SEEN.clear()
    together.module(x)
    together(x)
    return list(SEEN)


@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
        lambda: torch.device("meta"),
        lambda: torch.set_grad_enabled(True),
        warnings.catch_warnings,
    ],
    ids=["no_grad", "inference_mode", "bf16", "fp16_uncached", "device", "grad", "catch_warnings"],
)
def test_the_callers_modes_hold_on_every_card(context: Any) -> None:
    together = spread(Observes())
    x = batch(6).float()
    before = observed(together, x)
    with context():
        inside = observed(together, x)
    after = observed(together, x)
    assert len(inside) == 4
    assert all(seen == inside[0] for seen in inside)
    assert all(seen == before[0] for seen in [*before, *after])


def test_the_callers_default_dtype_context_variables_and_flags_hold_on_every_card() -> None:
    together = spread(Observes().double())
    x = batch(6)
    token = TAG.set("mine")
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        seen = observed(together, x)
    finally:
        TAG.reset(token)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    assert all(one == seen[0] for one in seen)
    assert seen[0]["tag"] == "mine"
    assert seen[0]["dtype"] == torch.float64


def test_autocast_computes_the_same() -> None:
    alone, together = twins(Net)
    alone, together = alone.float(), together.float()
    x = batch(6).float()
    outs = []
    for model in (alone, together):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        F.mse_loss(y.float(), x[:, :3]).backward()
        outs.append(y.detach())
    assert outs[1].dtype == torch.bfloat16
    assert torch.equal(outs[1], outs[0])
    for mine, theirs in zip(alone.parameters(), together.module.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, mine.grad, rtol=2e-2, atol=1e-3)


def test_function_modes_hold_on_every_card() -> None:
    class Doubles(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is F.linear else out

    alone, together = twins(Net)
    with Doubles():
        close(together(batch(7)), alone(batch(7)))


@pytest.mark.parametrize("cards", [2, 4])
def test_dropout_repeats_from_a_seed_and_differs_between_cards(cards: int) -> None:
    together = spread(nn.Dropout(0.5), cards)
    x = torch.ones(4 * cards, 64)
    masks = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        masks.append([together(x), together(x)])
    assert torch.equal(torch.stack(masks[0]), torch.stack(masks[1]))
    assert not torch.equal(masks[0][0], masks[2][0])
    assert not torch.equal(masks[0][0], masks[0][1])
    shards = masks[0][0].tensor_split(cards)
    assert len({tuple(shard[0].tolist()) for shard in shards}) == cards


def test_draws_on_one_card_are_plain_pytorchs() -> None:
    torch.manual_seed(0)
    alone = Dropped()
    together = spread(alone, 1)
    torch.manual_seed(1)
    expected = alone(batch(6).float())
    torch.manual_seed(1)
    assert torch.equal(together(batch(6).float()), expected)


class Fails(Net):
    """Raises what it is told, on the card that meets a flagged sample."""

    make_error: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 100).any()):
            raise type(self).make_error()
        return super().forward(x)


class TwoWordsError(Exception):
    """An error whose constructor takes more than a message."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")
        self.second = second


ERRORS: list[Any] = [
    lambda: ValueError("no such word"),
    lambda: KeyError("word"),
    lambda: TwoWordsError("no", "word"),
    lambda: StopIteration("word"),
    lambda: OSError(2, "word"),
]


@pytest.mark.parametrize(
    "make_error", ERRORS, ids=["ValueError", "KeyError", "TwoWordsError", "StopIteration", "OSError"]
)
@pytest.mark.parametrize("card", [0, 1, 2])
def test_an_exception_arrives_with_the_cards_name_and_its_traceback(make_error: Any, card: int) -> None:
    alone, together = twins(Fails)
    Fails.make_error = make_error
    x = batch(6)
    x[2 * card] = 1000
    with pytest.raises(type(make_error())) as caught:
        together(x)
    text = "".join(traceback.format_exception(caught.value))
    assert f"cpu:{card}" in text
    assert "word" in text
    assert "raise type(self).make_error()" in text, "the line that raised is shown"
    for model in (alone, together):
        F.mse_loss(model(batch(6)), batch(6, 3)).backward()
    same_state(alone, together)


class FailsBackward(torch.autograd.Function):
    """Raises in backward where a gradient belongs to a flagged sample."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flag: Tensor) -> Tensor:
        ctx.flagged = bool(flag.any())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.flagged:
            raise ValueError("no way back")
        return grad, None


@pytest.mark.parametrize("card", [0, 1, 2])
def test_an_exception_in_backward_arrives_with_the_cards_name(card: int) -> None:
    class Through(Net):
        def forward(self, x: Tensor) -> Tensor:
            return FailsBackward.apply(super().forward(x.clamp(max=1)), x > 100)

    alone, together = twins(Through)
    x = batch(6)
    x[2 * card] = 1000
    with pytest.raises(ValueError, match="no way back") as caught:
        together(x).sum().backward()
    assert f"cpu:{card}" in "".join(traceback.format_exception(caught.value))
    together.zero_grad()
    for model in (alone, together):
        F.mse_loss(model(batch(6)), batch(6, 3)).backward()
    same_state(alone, together)


def test_failures_on_all_cards_are_one_exception() -> None:
    _, together = twins(Fails)
    Fails.make_error = ERRORS[0]
    for _ in range(3):
        with pytest.raises(ValueError, match="word"):
            together(batch(6) + 1000)


def test_a_dropped_wrapper_ends_its_threads_and_frees_its_copies() -> None:
    before = set(threading.enumerate())
    _, together = twins(Net, 4)
    seen: list[Any] = []
    handle = together.module.head.register_forward_hook(lambda module, *_: seen.append(weakref.ref(module)))
    loss = together(batch(8)).square().mean()
    loss.backward()
    handle.remove()
    copies = [ref for ref in seen if ref() is not None and ref() is not together.module.head]
    assert copies, "the other cards run copies"
    whole = weakref.ref(together)
    del together, loss, handle
    gc.collect()
    assert whole() is None
    assert not threads_left(before)
    gc.collect()
    assert all(ref() is None for ref in copies)


def test_a_dropped_wrapper_still_lets_its_graph_go_backward() -> None:
    alone, together = twins(Net)
    module, loss = together.module, together(batch(7)).square().mean()
    del together
    gc.collect()
    loss.backward()
    alone(batch(7)).square().mean().backward()
    for mine, theirs in zip(alone.parameters(), module.parameters(), strict=True):
        close(theirs.grad, mine.grad)


def test_a_dropped_output_frees_its_graph() -> None:
    _, together = twins(Net)
    x = batch(7).requires_grad_()
    y = together(x)
    gone = weakref.ref(y)
    del y
    gc.collect()
    assert gone() is None
    together(x).sum().backward()


@pytest.mark.parametrize("cards", CARDS)
def test_many_wrappers_leave_no_threads(cards: int) -> None:
    before = set(threading.enumerate())
    for _ in range(3):
        spread(Net().double(), cards)(batch(7)).sum().backward()
    assert not threads_left(before)


def test_two_threads_of_the_user_are_served_in_turn_or_refused() -> None:
    alone, together = twins(Net)
    results: dict[int, list[Any]] = {0: [], 1: []}
    start = threading.Barrier(2)

    def call(x: Tensor) -> Any:
        try:
            y = together(x)
            y.square().mean().backward()
        except ManycardError as refused:
            return refused
        return y.detach()

    def work(which: int) -> None:
        start.wait()
        results[which].extend(call(batch(5 + which, seed=10 * which + step)) for step in range(5))

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "the callers wait for each other"
    for which, outs in results.items():
        assert len(outs) == 5
        for step, out in enumerate(outs):
            if isinstance(out, ManycardError):
                continue
            y = alone(batch(5 + which, seed=10 * which + step))
            y.square().mean().backward()
            close(out, y.detach())
    if not any(isinstance(out, ManycardError) for outs in results.values() for out in outs):
        for mine, theirs in zip(alone.parameters(), together.module.parameters(), strict=True):
            torch.testing.assert_close(theirs.grad, mine.grad, rtol=1e-9, atol=1e-9)


def test_backward_from_another_thread() -> None:
    alone, together = twins(Net)
    y = together(batch(7)).square().mean()
    thread = threading.Thread(target=y.backward)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    alone(batch(7)).square().mean().backward()
    same_state(alone, together)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system can't fork")
def test_workers_forked_while_card_threads_run() -> None:
    alone, together = twins(Net)
    together(batch(7)).sum().backward()
    together.zero_grad()
    data = TensorDataset(batch(24))
    loader = DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of fork in a process with threads
        for (x,) in loader:
            for model in (alone, together):
                model(x).square().mean().backward()
    same_state(alone, together)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system can't fork")
def test_a_forked_child_ends_although_it_inherits_the_wrapper() -> None:
    _, together = twins(Net)
    together(batch(7))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        del together
        gc.collect()
        os._exit(0)
    end = time.monotonic() + 10
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child waits for threads that it does not have")
    assert status == 0
