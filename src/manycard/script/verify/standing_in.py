"""Telling a `Recorder` what a script does: stand-ins for the functions and methods of PyTorch and manycard it calls.

`watching` puts them in place and takes them away again. Each calls what it stands in for, with the same arguments.

The yardstick of a script for ranks is one rank that gets what all of them get together: with ``ranks=k``, samplers
pad as they would for k ranks, and batches drawn through a DistributedSampler are k times as large.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import manycard.engine.data_parallel as drop_in
import manycard.parallel.pipeline as pipelines
from manycard.cards import Card
from manycard.data import GlobalLoader
from manycard.engine.batches.batch import count_samples
from manycard.engine.data_parallel import DataParallel
from manycard.parallel import Parallel, Pipeline
from manycard.script.verify.recorder import Recorder
from manycard.strategies.train_step import TrainStep

__all__ = ["watching"]


@contextlib.contextmanager
def watching(
    recorder: Recorder,
    *,
    on_manycard: Callable[[], None],
    drop_in_cards: Callable[[tuple[Card, ...]], tuple[Card, ...]] | None = None,
    ranks: int = 1,
    one_card: bool = False,
) -> Iterator[None]:
    """Tell `recorder` of everything while this is entered.

    Args:
        on_manycard: called when the script makes a `Parallel`, a `Pipeline` or a `DataParallel`.
        drop_in_cards: gives a `DataParallel`'s cards in place of those it chose.
        ranks: how many ranks' batches this one stands for.
        one_card: let a `Pipeline` be its model on its first card, which gets whole batches.
    """
    with contextlib.ExitStack() as stack:
        for stand_in in (_backward, _optimizers, _scaling, _loaders, _train_steps):
            stand_in(stack, recorder)
        _manycard(stack, recorder, on_manycard, drop_in_cards)
        if one_card:
            _without_stages(stack)
        if ranks > 1:
            _widen(stack, ranks)
        yield


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace ``owner.name`` by ``make(original)``, in the original's clothes, until the stack ends."""
    original = getattr(owner, name)
    own = name in vars(owner)
    setattr(owner, name, functools.wraps(original)(make(original)))
    stack.callback(
        functools.partial(setattr, owner, name, original) if own else functools.partial(delattr, owner, name)
    )


def _backward(stack: contextlib.ExitStack, recorder: Recorder) -> None:
    def make(original: Any) -> Any:
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **settings: Any) -> Any:
            # Inside a backward pass: a checkpoint's, or the engine's.
            if not recorder.listens() or torch._C._current_graph_task_id() != -1:
                return original(tensors, grad_tensors, *args, **settings)
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            given = [grad_tensors] if isinstance(grad_tensors, Tensor) else list(grad_tensors or [None] * len(roots))
            recorder.note_backward(roots, given)
            result = original(roots, grad_tensors, *args, **settings)
            recorder.note_backward_done()
            return result

        return backward

    _replace(stack, torch.autograd, "backward", make)


def _optimizers(stack: contextlib.ExitStack, recorder: Recorder) -> None:
    stack.callback(register_optimizer_step_pre_hook(recorder.before_step).remove)
    stack.callback(register_optimizer_step_post_hook(recorder.after_step).remove)

    def make(original: Any) -> Any:
        def note_and_make(optimizer: Any, *args: Any, **settings: Any) -> None:
            recorder.has_optimizer = True
            original(optimizer, *args, **settings)

        return note_and_make

    _replace(stack, Optimizer, "__init__", make)


def _scaling(stack: contextlib.ExitStack, recorder: Recorder) -> None:
    """Whether a loss scale is in the gradients when the script clips them."""

    def scaling(original: Any) -> Any:
        def scale(scaler: Any, *args: Any, **settings: Any) -> Any:
            recorder.scaled = recorder.scaled or scaler.is_enabled()
            return original(scaler, *args, **settings)

        return scale

    def unscaling(original: Any) -> Any:
        def unscale(scaler: Any, *args: Any, **settings: Any) -> Any:
            recorder.scaled = False
            return original(scaler, *args, **settings)

        return unscale

    def clipping(original: Any) -> Any:
        def clip(*args: Any, **settings: Any) -> Any:
            if recorder.listens():
                recorder.note_clip()
            return original(*args, **settings)

        return clip

    _replace(stack, torch.amp.GradScaler, "scale", scaling)
    _replace(stack, torch.amp.GradScaler, "unscale_", unscaling)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            _replace(stack, owner, name, clipping)


def _loaders(stack: contextlib.ExitStack, recorder: Recorder) -> None:
    def walking(original: Any) -> Any:
        def walk(loader: Any) -> Any:
            recorder.epoch += recorder.active
            return original(loader)

        return walk

    def sampling(original: Any) -> Any:
        def sample(sampler: Any) -> Any:
            if recorder.active:
                recorder.facts["shuffles"] = recorder.facts["shuffles"] or bool(sampler.shuffle)
                padding = sampler.total_size - len(sampler.dataset)
                recorder.facts["padding"] = max(recorder.facts["padding"], padding)
            return original(sampler)

        return sample

    _replace(stack, DataLoader, "__iter__", walking)
    _replace(stack, GlobalLoader, "__iter__", walking)
    _replace(stack, DistributedSampler, "__iter__", sampling)


def _train_steps(stack: contextlib.ExitStack, recorder: Recorder) -> None:
    def stepping(original: Any) -> Any:
        def call(step: Any, batch: Any) -> Any:
            if not recorder.listens():
                return original(step, batch)
            held = count_samples(batch)
            module = step._strategy.unwrap(step._model)
            samples = step._strategy.feed.samples(held)
            return recorder.train_step(
                module, batch, samples, step._optimizers, functools.partial(original, step, batch)
            )

        return call

    def passing_back(original: Any) -> Any:
        def backward(parallel: Any, loss: Tensor) -> None:
            if not recorder.listens():
                original(parallel, loss)
                return
            recorder.note_loss(float(loss.detach()))
            with recorder.inside():
                original(parallel, loss)
            recorder.note_backward_done()

        return backward

    _replace(stack, TrainStep, "__call__", stepping)
    _replace(stack, Parallel, "backward", passing_back)


def _manycard(
    stack: contextlib.ExitStack,
    recorder: Recorder,
    on_manycard: Callable[[], None],
    drop_in_cards: Callable[[tuple[Card, ...]], tuple[Card, ...]] | None,
) -> None:
    def making(original: Any) -> Any:
        def note_and_make(made: Any, *args: Any, **settings: Any) -> None:
            recorder.facts["uses_manycard"] = True
            on_manycard()
            original(made, *args, **settings)
            recorder.cards = tuple(map(str, made.cards))
            if isinstance(made, Parallel) and made.strategy.options.reduce_dtype is not None:
                recorder.precisions.add("half")

        return note_and_make

    for kind in (Parallel, Pipeline, DataParallel):
        _replace(stack, kind, "__init__", making)
    if drop_in_cards is not None:
        choose = drop_in_cards
        _replace(stack, drop_in, "_cards", lambda original: lambda ids: choose(original(ids)))
        # A card that the script names for outputs may not be among them.
        _replace(stack, drop_in, "_output_position", lambda original: lambda output, cards: 0)


def _without_stages(stack: contextlib.ExitStack) -> None:
    whole = {"stages": "auto", "micro_batches": 1, "replicas": 1, "checkpoint_activations": False, "memory": None}

    def making(original: Any) -> Any:
        def make(made: Any, model: Any, cards: Any = "all", **settings: Any) -> None:
            original(made, model, cards, **settings | whole)

        return make

    _replace(stack, Pipeline, "__init__", making)
    _replace(stack, pipelines, "choose_run_cards", lambda original: lambda spec: original(spec)[:1])


def _widen(stack: contextlib.ExitStack, ranks: int) -> None:
    """Let samplers and batches of this one rank be those of `ranks` together."""

    def padding(original: Any) -> Any:
        def make(sampler: Any, *args: Any, **settings: Any) -> None:
            original(sampler, *args, **settings)
            if sampler.num_replicas == 1:
                size = len(sampler.dataset)
                rounded = size // ranks if sampler.drop_last else -(-size // ranks)
                sampler.num_samples = sampler.total_size = rounded * ranks

        return make

    def widening(original: Any) -> Any:
        def make(sampler: Any, inner: Any, batch_size: int, *args: Any, **settings: Any) -> None:
            wide = batch_size * ranks if isinstance(inner, DistributedSampler) else batch_size
            original(sampler, inner, wide, *args, **settings)

        return make

    _replace(stack, DistributedSampler, "__init__", padding)
    _replace(stack, BatchSampler, "__init__", widening)
