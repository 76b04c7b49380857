"""Finding out whether a module's calls can be cut, by doing it and comparing with one card.

`find_layout` runs copies of the module on a real call: one on the whole batch, on the primary card, and one spread
over the cards for each way of cutting that shapes allow, until outputs, gradients of parameters and inputs, buffers
and attributes all come out the same. The script's module, its random state and its output are not touched.

Set aside, because they differ between one card and several by nature: draws (dropout is off, and each sample draws the
same on whichever card, as `manycard.script.comparison.pinned` says) and BatchNorm statistics (the layers are put into
evaluation mode). The verdict says whether there were any.

What can't be compared is left on one card, with the reason in words: cutting changes a result; forward keeps what it
computed in an attribute or buffer, of which the script would see one card's part; a hook of the script's would see
parts; forward draws in a way that can't be pinned; the module can't be copied.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from manycard.cards.card import Card
from manycard.engine.batches.batch import tensors_in
from manycard.engine.batches.layout import Layout, Piece
from manycard.engine.batches.sizes import shard_sizes
from manycard.engine.calls.spreader import Spreader
from manycard.engine.replicas.sync_batchnorm import SyncedBatchNorm
from manycard.errors import BatchError, ManycardError
from manycard.script.comparison.different import DifferentError, DifferentGradientError, OpaqueError
from manycard.script.comparison.layout import Joined, JoinRule, candidate_cuts
from manycard.script.comparison.leaks import MadeTensors
from manycard.script.comparison.outside import Outside
from manycard.script.comparison.pinned import PATTERNS, Way
from manycard.script.comparison.rules import REDUCTIONS
from manycard.script.comparison.trial import Trial
from manycard.script.comparison.words import first_line, in_words
from manycard.script.means import InParts

__all__ = ["Verdict", "batchnorm_in_training", "find_layout"]

_WRITES = "forward writes into its input"
_ENOUGH = 32
"""Samples a card that a comparison on GPUs looks at."""


@dataclass(frozen=True)
class Verdict:
    """What the comparison found."""

    layout: Joined | None
    """How to cut and join; None where the calls stay on one card."""
    reason: str = ""
    """Why they stay on one card, as the end of a sentence."""
    draws: bool = False
    """Whether forward draws at random, so that runs on one card and on several can't be equal."""
    decided: bool = True
    """False while a mean or sum over the batch is zero, and any weighting of samples the same."""


@dataclass(frozen=True)
class _Attempt:
    """How a call is run in parts."""

    cut: Layout
    sizes: Sequence[int]
    way: Way
    """What a part's draws are taken for."""
    double: bool


class _TrialError(Exception):
    """A call of the copy, on the whole batch, raised."""


def find_layout(
    module: nn.Module,
    cards: Sequence[Card],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known: Joined | None = None,
    in_parts: InParts = Spreader,
) -> Verdict:
    """Find how calls like this one can be cut.

    Args:
        module: the script's module, on the first of `cards`.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        known: the layout found before, to be checked again on this call; no other is tried then.
        in_parts: how trials are spread.
    """
    with _untouched(cards):
        size = _least(cards, (args, kwargs))
        while True:
            with contextlib.suppress(torch.OutOfMemoryError):
                comparison = _Comparison(module, cards, (args, kwargs), size, known, in_parts)
                try:
                    return comparison.verdict()
                finally:
                    comparison.outside.restore()
            size = _half_of((args, kwargs), size)
            if size is None and known is not None:
                return Verdict(known, draws=True)  # right before; a full card says nothing against it
            if size is None:
                return Verdict(None, "the card has no memory left to compare with")


class _Comparison:
    """Trials of one call.

    Args:
        size: how many samples of the call to compare; None for all.
        known: the layout found before.
        in_parts: how trials are spread.
    """

    def __init__(
        self,
        module: nn.Module,
        cards: Sequence[Card],
        batch: Any,
        size: int | None,
        known: Joined | None,
        in_parts: InParts,
    ) -> None:
        self._module = module
        self._cards = cards
        self._whole_batch = self._batch = batch
        self._size = size
        self._known = known
        self._in_parts = in_parts
        self._counts = False
        self.outside = Outside(module)

    def verdict(self) -> Verdict:
        """Compare in double precision, or else as the call is.

        In double precision a coincidence can't pass for equality, nor rounding for a difference: the gradients of a
        deep network in bf16 may be mostly rounding.
        """
        try:
            cuts = [self._known.cut] if self._known is not None else candidate_cuts(self._batch)
            if self._size is not None:
                self._batch = _first_of(self._batch, cuts[0], self._size)
            with contextlib.suppress(_TrialError), _in_double_precision(self._cards):
                return self._compare(cuts, double=True)
            return self._compare(cuts, double=False)
        except _TrialError as error:
            if self._size is not None:  # the first samples may be no call of their own
                self._size, self._batch = None, self._whole_batch
                return self.verdict()
            # The script's own call will show it.
            return Verdict(None, f"a trial call raised {error}")
        except (ManycardError, OpaqueError) as error:
            return Verdict(None, str(error).rstrip("."))

    def _trial(self, *, double: bool, pattern: int = 0) -> Trial:
        return Trial(
            self._module,
            self._cards,
            self._batch,
            double=double,
            in_parts=self._in_parts,
            pattern=pattern,
            outside=self.outside,
        )

    def _compare(self, cuts: Sequence[Layout], *, double: bool) -> Verdict:
        whole, reason = self._whole(double=double)
        if whole is None:
            return Verdict(None, reason)
        reason = "no dimension of its inputs counts at least two samples"
        for number, cut in enumerate(cuts):
            samples = _count(cut, self._batch)
            if samples < 2:
                continue
            sizes = shard_sizes(samples, len(self._cards)) if self._known else _uneven(samples, len(self._cards))
            try:
                rules = self._rules(cut, sizes, whole, double=double)
            except torch.OutOfMemoryError:
                raise
            except DifferentError as difference:
                if number == 0 or reason.startswith("no "):
                    permutes = ", and forward draws a permutation" if whole.permuted else ""
                    reason = f"{difference}{permutes}"
            except Exception as error:
                if reason.startswith("no "):
                    reason = f"it can't be cut: {in_words(error)}"
            else:
                if whole.keeps_graph:
                    return Verdict(None, "forward keeps a tensor in an attribute, with a part of its output's graph")
                joined = Joined(cut, rules, self._counts)
                return Verdict(joined, draws=whole.draws, decided=_are_decided(rules, whole))
        return Verdict(None, reason, whole.draws)

    def _rules(self, cut: Layout, sizes: Sequence[int], whole: Trial, *, double: bool) -> tuple[JoinRule, ...]:
        """The rules that join the call, cut so, to what one card gave.

        Raises:
            DifferentError: none does, whatever draws stand for; the difference is that of the likeliest way.
        """
        likeliest, *others = (_Attempt(cut, sizes, way, double) for way in (Way if whole.drew else [Way.ROWS]))
        try:
            return self._joining(whole, likeliest)
        except DifferentError as difference:
            first = difference.with_traceback(None)  # which would keep the trial's memory
        for attempt in others:
            with contextlib.suppress(DifferentError):
                return self._joining(whole, attempt)
        raise first

    def _joining(self, whole: Trial, attempt: _Attempt) -> tuple[JoinRule, ...]:
        """The rules by which values and gradients come out as those of `whole`.

        Values may fit several rules (a loss whose logits are all zero); the first that fits the gradients wins.

        Raises:
            DifferentError: none does; the difference is that of the first that was tried.
        """
        try:
            return self._checked(whole, attempt, self._known.rules if self._known else ())
        except DifferentGradientError as difference:
            first = difference.with_traceback(None)
        for rules in first.other_rules:
            with contextlib.suppress(DifferentError):
                return self._checked(whole, attempt, rules)
        raise first

    def _checked(self, whole: Trial, attempt: _Attempt, wanted: Sequence[JoinRule]) -> tuple[JoinRule, ...]:
        """As `_in_parts_as`; where forward draws and this is no repetition, with other things drawn as well."""
        rules = self._in_parts_as(whole, attempt, wanted)
        for pattern in range(1, PATTERNS) if whole.drew and self._known is None else ():
            drawn_otherwise = self._run_whole(double=attempt.double, pattern=pattern)
            if self._in_parts_as(drawn_otherwise, attempt, rules, pattern) != rules:
                raise DifferentError("what forward draws decides how parts of the batch go together")
        return rules

    def _in_parts_as(
        self, whole: Trial, attempt: _Attempt, rules: Sequence[JoinRule], pattern: int = 0
    ) -> tuple[JoinRule, ...]:
        """Run the call in parts, and compare; gives the rules that join it, `rules` where they do.

        Raises:
            DifferentError: it is not `whole`.
        """
        trial = self._trial(double=attempt.double, pattern=pattern)
        try:
            found = trial.run_spread(attempt.cut, attempt.sizes, whole, rules, attempt.way)
            whole.compare(trial)
            self._counts = trial.counts
            return found
        except DifferentGradientError as difference:
            difference.other_rules = trial.other_rules()
            raise
        except DifferentError:
            whole.compare_outside(trial)  # which may be why
            raise
        finally:
            trial.close()

    def _whole(self, *, double: bool) -> tuple[Trial | None, str]:
        """The run that others are compared with, and why there can't be one.

        Raises:
            _TrialError: the module raised.
        """
        if self._known is not None:
            known = self._run_whole(double=double)
            return (None, _WRITES) if known.writes_input() else (known, "")
        made = MadeTensors({size for tensor in tensors_in(self._batch) for size in tensor.shape if size > 1})
        whole, repeated = self._run_whole(double=double, made=made), self._run_whole(double=double, made=made)
        try:
            whole.compare(repeated)
        except DifferentError:
            return None, "forward gives another result each time, so nothing can be compared"
        if whole.writes_input():
            return None, _WRITES
        del whole, repeated
        if made.left():
            made.clear()
            return None, "forward leaves tensors outside the module (in a global list, say)"
        return self._run_whole(double=double), ""

    def _run_whole(self, *, double: bool, made: MadeTensors | None = None, pattern: int = 0) -> Trial:
        trial = self._trial(double=double, pattern=pattern)
        try:
            with made or contextlib.nullcontext():
                trial.run_whole()
        except (torch.OutOfMemoryError, OpaqueError):
            raise
        except Exception as error:
            raise _TrialError(f"{type(error).__name__}: {first_line(error)}") from None
        return trial


def _are_decided(rules: Sequence[JoinRule], whole: Trial) -> bool:
    """Whether what is added up over the batch is anything but zero."""
    reductions = [isinstance(rule, REDUCTIONS) for rule in rules]
    if not any(reductions):
        return True
    # Lists with an item a sample are joined without rules: then any output may be the one that is added up.
    reduced = whole.outputs if len(rules) < len(whole.outputs) else itertools.compress(whole.outputs, reductions)
    return all(bool(output.detach().count_nonzero()) for output in reduced)


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


def _first_of(batch: Any, cut: Layout, size: int) -> Any:
    """The first `size` samples of a call; all of it where it has no more."""
    samples = cut.count(batch)
    if samples <= size:
        return batch

    def take(tensor: Tensor, piece: Piece | None) -> Tensor:
        return tensor if piece is None else piece.of(tensor)

    return cut.take_shard(batch, [size, samples - size], 0, take)


def _count(cut: Layout, batch: Any) -> int:
    try:
        return cut.count(batch)
    except BatchError:
        return 0


def _least(cards: Sequence[Card], batch: Any) -> int | None:
    """How many samples of a large batch to compare, where double precision is slow; None for all."""
    if cards[0].simulated:
        return None
    cuts = candidate_cuts(batch)
    enough = _ENOUGH * len(cards)
    return enough if cuts and _count(cuts[0], batch) > enough else None


def _half_of(batch: Any, size: int | None) -> int | None:
    """The next smaller number of samples to compare on; None when there is none."""
    if size is None:
        cuts = candidate_cuts(batch)
        size = cuts[0].count(batch) if cuts else 1
    return size // 2 if size >= 4 else None


@contextlib.contextmanager
def _in_double_precision(cards: Sequence[Card]) -> Iterator[None]:
    """New tensors are fp64, and nothing is cast to less."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with contextlib.ExitStack() as stack:
            for kind in {card.device.type for card in cards} | {"cpu"}:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _untouched(cards: Sequence[Card]) -> Iterator[None]:
    """Keep every random state as it is, and trial calls' output off the script's log."""
    # The cache of an autocast context that the script is in would keep weights of the copies.
    cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    host, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    gpus = [card.device for card in cards if not card.simulated]
    states = [torch.cuda.get_rng_state(device) for device in gpus]
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_autocast_cache_enabled(cache)
        torch.set_rng_state(host)
        random.setstate(python)
        np.random.set_state(numpy)
        for device, state in zip(gpus, states, strict=True):
            torch.cuda.set_rng_state(state, device)
