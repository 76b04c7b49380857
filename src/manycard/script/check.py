"""Finding out whether a module's calls can be cut, by doing it and comparing with one card.

`find_layout` runs copies of the module on a real call: one on the whole batch, on the primary card, and one spread
over the cards for each way of cutting that shapes allow, until outputs, gradients of parameters and inputs, buffers
and attributes all come out the same. The script's module, its random state and its output are not touched.

Set aside, because they differ between one card and several by nature: draws (dropout and noise are pinned) and
BatchNorm statistics (the layers are put into evaluation mode). The verdict says whether there were any.

What can't be compared is left on one card, with the reason in words: cutting changes a result; forward keeps what it
computed in an attribute or buffer, of which the script would see one card's part; a hook of the script's would see
parts; forward draws in a way that can't be pinned; the module can't be copied.
"""

from __future__ import annotations

import contextlib
import io
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from manycard.cards.card import Card
from manycard.engine.batch import map_tensors, tensors_in
from manycard.engine.copying import ModuleCopier
from manycard.engine.joining import Join
from manycard.engine.layout import Layout, Piece, TakePiece
from manycard.engine.settling import settle
from manycard.engine.sizes import shard_sizes
from manycard.engine.spreader import Spreader
from manycard.engine.sync_batchnorm import SyncedBatchNorm
from manycard.engine.watching import Watch
from manycard.errors import BatchError, ManycardError
from manycard.script.closeness import differ, tolerance_of
from manycard.script.layout import Joined, JoinRule, candidate_cuts, rules_for
from manycard.script.output import PrimaryOutput
from manycard.script.pinned import HostDraws, PinnedDraws

__all__ = ["Verdict", "batchnorm_in_training", "find_layout"]

_LONGEST = 160
"""Characters of an error's first line that a reason quotes."""


@dataclass(frozen=True)
class Verdict:
    """What the comparison found."""

    layout: Joined | None
    """How to cut and join; None where the calls stay on one card."""
    reason: str = ""
    """Why they stay on one card, as the end of a sentence."""
    draws: bool = False
    """Whether forward draws at random, so that runs on one card and on several can't be equal."""


class _DifferentError(Exception):
    """A way of cutting gives another result."""


def find_layout(
    module: nn.Module, cards: Sequence[Card], args: tuple[Any, ...], kwargs: dict[str, Any], known: Joined | None = None
) -> Verdict:
    """Find how calls like this one can be cut.

    Args:
        module: the script's module, on the first of `cards`.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        known: the layout found before, to be checked again on this call; no other is tried then.
    """
    with _untouched(cards):
        size: int | None = None
        while True:
            with contextlib.suppress(torch.OutOfMemoryError):
                return _find(module, cards, (args, kwargs), known, size)
            size = _half_of((args, kwargs), size)
            if size is None:
                return Verdict(None, "the card has no memory left to compare with")


def _find(module: nn.Module, cards: Sequence[Card], batch: Any, known: Joined | None, size: int | None) -> Verdict:
    try:
        cuts = [known.cut] if known is not None else candidate_cuts(batch)
        whole = _Trial(module, cards, batch if size is None else _first_of(batch, cuts[0], size))
    except ManycardError as error:
        return Verdict(None, str(error).rstrip("."))
    reason = "no dimension of its inputs counts at least two samples"
    try:
        whole.run_whole()
        repeated = _Trial(module, cards, whole.batch)
        repeated.run_whole()
        whole.compare(repeated, [])
    except _DifferentError:
        return Verdict(None, "forward gives another result each time, so nothing can be compared")
    except Exception as error:
        # The script's own call will show it.
        return Verdict(None, f"a trial call raised {type(error).__name__}: {_first_line(error)}")
    for number, cut in enumerate(cuts):
        try:
            samples = cut.count(whole.batch)
        except BatchError:
            continue
        if samples < 2:
            continue
        trial = _Trial(module, cards, whole.batch)
        try:
            rules = trial.run_spread(cut, samples, whole)
            whole.compare(trial, rules)
            return Verdict(Joined(cut, tuple(rules)), draws=whole.draws)
        except torch.OutOfMemoryError:
            raise
        except _DifferentError as difference:
            reason = str(difference) if number == 0 or reason.startswith("no ") else reason
        except Exception as error:
            if reason.startswith("no "):
                reason = f"it can't be cut: {_first_line(error)}"
        finally:
            trial.close()
    return Verdict(None, reason, whole.draws)


class _Trial:
    """One run of a copy of the module."""

    def __init__(self, module: nn.Module, cards: Sequence[Card], batch: Any) -> None:
        self.cards = cards
        self.batch = map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), batch)
        with torch.inference_mode(False):
            self.module = ModuleCopier(module, cards[0].device).replica
        self.draws = any(_draws(part) for part in self.module.modules())
        settle(self.module)
        self._watch = Watch(self.module)
        self._mode = PinnedDraws()
        self._host_draws = HostDraws()
        self.module.register_forward_pre_hook(self._host_draws.pin)
        self.module.register_forward_hook(self._host_draws.look)
        self._text = io.StringIO()
        self._spreader: Spreader | None = None
        self.outputs: list[Tensor] = []
        self.written: dict[tuple[int, str], Any] = {}

    def run_whole(self) -> None:
        """Run it on the whole batch, on the primary card."""
        with self._observed():
            value = self.module(*self.batch[0], **self.batch[1])
        self._finish(value)

    def run_spread(self, cut: Layout, samples: int, whole: _Trial) -> list[JoinRule]:
        """Run it cut over the cards; gives the rules by which its outputs join to those of `whole`."""
        self._spreader = Spreader(self.module, self.cards)
        probing = _Probing(cut, whole.outputs)
        sizes = _uneven(samples, len(self.cards))
        with self._observed():
            value = self._spreader.call(self.batch[0], self.batch[1], sizes, probing)
        self._finish(value)
        if len(self.outputs) != len(whole.outputs):
            raise _DifferentError("cutting it changes how many tensors it returns")
        return probing.rules

    @contextlib.contextmanager
    def _observed(self) -> Iterator[None]:
        """Draws are pinned, and what the primary prints is kept."""
        with self._mode, contextlib.redirect_stdout(PrimaryOutput(self._text)):
            yield

    def close(self) -> None:
        """Let go of the threads that a spread run needed."""
        if self._spreader is not None:
            self._spreader.close()

    def _finish(self, value: Any) -> None:
        self.outputs = list(tensors_in(value))
        self._watch_state()
        varying = [output for output in self.outputs if output.requires_grad]
        if torch.is_grad_enabled() and varying:
            cotangents = [_cotangent(number, output) for number, output in enumerate(varying)]
            with self._mode:  # checkpoints run forward again
                torch.autograd.backward(varying, cotangents)
        self.draws = self.draws or self._mode.drawn or self._host_draws.drawn

    def _watch_state(self) -> None:
        for change in self._watch.changes():
            self.written[(change.module, change.name)] = None if change.gone else self._watch.value(change)

    def compare(self, other: _Trial, rules: Sequence[JoinRule]) -> None:
        """Compare the results of two runs.

        Raises:
            _DifferentError: they differ; says in what.
        """
        for number, (own, others) in enumerate(zip(self.outputs, other.outputs, strict=True)):
            found = differ(own, others, tolerance_of(own))
            if found:
                raise _DifferentError(f"cutting the batch changes output {number} ({found})")
        self._compare_gradients(other)
        self._compare_state(other)
        if self._text.getvalue() != other._text.getvalue():
            raise _DifferentError("forward prints what it sees of the batch")

    def _compare_gradients(self, other: _Trial) -> None:
        named = list(self.module.named_parameters())
        largest = max((_largest(parameter.grad) for _, parameter in named), default=0.0)
        for (name, own), others in zip(named, other.module.parameters(), strict=True):
            found = _differ_in_gradient(own, others, largest)
            if found:
                raise _DifferentError(f"cutting the batch changes the gradient of {name} ({found})")
        inputs = list(tensors_in(self.batch))
        largest = max((_largest(tensor.grad) for tensor in inputs), default=0.0)
        for number, (tensor, another) in enumerate(zip(inputs, tensors_in(other.batch), strict=True)):
            found = _differ_in_gradient(tensor, another, largest)
            if found:
                raise _DifferentError(f"cutting the batch changes the gradient of input {number} ({found})")

    def _compare_state(self, other: _Trial) -> None:
        for (name, buffer), others in zip(self.module.named_buffers(), other.module.buffers(), strict=True):
            if differ(buffer, others, tolerance_of(buffer)):
                raise _DifferentError(f"forward computes buffer {name} from the whole batch")
        parts = list(self.module.modules())
        for key in {**self.written, **other.written}:
            missing = key not in self.written or key not in other.written
            if missing or not _same(self.written[key], other.written[key]):
                raise _DifferentError(
                    f"forward keeps what it sees of the batch in {type(parts[key[0]]).__name__}.{key[1]}, which would"
                    " hold one card's part"
                )


class _Probing(Layout):
    """Cuts by `cut`, and finds for each output the rule that joins it to what one card gave."""

    def __init__(self, cut: Layout, outputs: Sequence[Tensor]) -> None:
        self.dim = cut.dim
        self._cut = cut
        self._outputs = outputs
        self.rules: list[JoinRule] = []

    def count(self, batch: Any) -> int:
        return self._cut.count(batch)

    def take_shard(self, batch: Any, sizes: Sequence[int], position: int, take: TakePiece) -> Any:
        return self._cut.take_shard(batch, sizes, position, take)

    def lists_samples(self, batch: Any, total: int) -> bool:
        return self._cut.lists_samples(batch, total)

    def plan_join(self, leaf: int, parts: Sequence[Tensor], samples: Sequence[int], name: str) -> Join:
        if leaf >= len(self._outputs):
            raise _DifferentError("cutting it changes how many tensors it returns")
        whole = self._outputs[leaf].detach()
        found = "its shape doesn't follow the batch"
        for rule in rules_for(parts[0].dim()):
            join = rule.plan(parts, samples)
            if join is None:
                continue
            joined = join.join([part.detach().to(whole.device) for part in parts])
            difference = differ(whole, joined, tolerance_of(whole))
            if difference is None:
                self.rules.append(rule)
                return join
            if joined.shape == whole.shape:
                found = difference
        raise _DifferentError(f"cutting the batch changes output {name} ({found})")


def _draws(part: nn.Module) -> bool:
    if isinstance(part, _DropoutNd):
        return part.training and part.p > 0
    dropout = getattr(part, "dropout", None)
    return part.training and isinstance(dropout, float) and dropout > 0


def batchnorm_in_training(module: nn.Module) -> bool:
    """Whether a BatchNorm layer takes its statistics from each card's shard."""
    return any(
        isinstance(part, _BatchNorm) and part.training and not isinstance(part, SyncedBatchNorm | nn.SyncBatchNorm)
        for part in module.modules()
    )


def _uneven(samples: int, cards: int) -> list[int]:
    """Shards of different sizes where there are samples enough, so that a wrong weighting shows."""
    sizes = shard_sizes(samples, cards)
    if len(set(sizes)) == 1 and sizes[0] > 1:
        sizes[0], sizes[-1] = sizes[0] + 1, sizes[-1] - 1
    return sizes


def _cotangent(number: int, output: Tensor) -> Tensor:
    """A gradient to send back from an output; the same for outputs of equal shape."""
    if output.dim() == 0:
        return torch.ones_like(output)
    drawn = torch.randn(output.shape, generator=torch.Generator().manual_seed(number))
    return drawn.to(device=output.device, dtype=output.dtype)


def _largest(gradient: Tensor | None) -> float:
    if gradient is None or gradient.numel() == 0:
        return 0.0
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return float(dense.abs().max())


def _differ_in_gradient(own: Tensor, other: Tensor, largest: float) -> str | None:
    if own.grad is None or other.grad is None:
        # None on the whole batch and zero from a card that did not use it are the same to an optimizer step only
        # where the script sees None, which the boundary keeps.
        return None if own.grad is other.grad else "there is one in one of them only"
    return differ(own.grad, other.grad, 10 * tolerance_of(own), scale=0.01 * largest)


def _same(one: Any, other: Any, depth: int = 3) -> bool:
    """Whether two values that forward wrote are alike, as far as can be told."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return differ(one, other, tolerance_of(one)) is None
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return bool(one == other or abs(one - other) <= 1e-4 * max(abs(one), abs(other)))
    if isinstance(one, bool | int | str):
        return bool(one == other)
    if depth and isinstance(one, Mapping):
        return list(one) == list(other) and all(_same(one[key], other[key], depth - 1) for key in one)
    if depth and isinstance(one, list | tuple):
        return len(one) == len(other) and all(_same(a, b, depth - 1) for a, b in zip(one, other, strict=True))
    return True


def _first_of(batch: Any, cut: Layout, size: int) -> Any:
    """The first `size` samples of a call."""
    samples = cut.count(batch)

    def take(tensor: Tensor, piece: Piece | None) -> Tensor:
        return tensor if piece is None else piece.of(tensor)

    return cut.take_shard(batch, [size, samples - size], 0, take)


def _half_of(batch: Any, size: int | None) -> int | None:
    """The next smaller number of samples to compare on; None when there is none."""
    if size is None:
        cuts = candidate_cuts(batch)
        size = cuts[0].count(batch) if cuts else 1
    return size // 2 if size >= 4 else None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= _LONGEST else f"{lines[0][:_LONGEST]}..."


@contextlib.contextmanager
def _untouched(cards: Sequence[Card]) -> Iterator[None]:
    """Keep every random state as it is, and trial calls' output off the script's log."""
    host, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    gpus = [card.device for card in cards if not card.simulated]
    states = [torch.cuda.get_rng_state(device) for device in gpus]
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_rng_state(host)
        random.setstate(python)
        np.random.set_state(numpy)
        for device, state in zip(gpus, states, strict=True):
            torch.cuda.set_rng_state(state, device)
