"""One run of a copy of a module on one call, and how two runs are compared.

A trial leaves the script's module and inputs as they are. Draws are pinned, dropout and BatchNorm are put in evaluation
mode, and what the primary prints is kept. Compared are outputs, gradients of parameters and inputs, buffers,
attributes that forward wrote, and what it printed.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from manycard.cards.card import Card
from manycard.engine.batches.batch import map_tensors, tensors_in
from manycard.engine.batches.layout import Layout
from manycard.engine.calls.spreader import Spreader
from manycard.engine.replicas.copying import ModuleCopier
from manycard.engine.replicas.settling import settle
from manycard.engine.replicas.watching import Watch
from manycard.errors import BatchError
from manycard.script.comparison.closeness import differ, tolerance_of
from manycard.script.comparison.different import DifferentError, DifferentGradientError, OpaqueError
from manycard.script.comparison.indices import CheckedIndices
from manycard.script.comparison.layout import ByTensor, JoinRule
from manycard.script.comparison.outside import Outside
from manycard.script.comparison.pinned import HostDraws, PinnedDraws, Way
from manycard.script.comparison.plain import LEFT_OUT, PLAIN, alike, beside_tensors, looks
from manycard.script.comparison.probing import Probing, cotangent
from manycard.script.means import InParts, RunsParts
from manycard.script.output import PrimaryOutput

__all__ = ["Trial"]


_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})
_MOST_RULES = 12
"""Ways of joining one call's outputs that are tried."""


class Trial:
    """One run of a copy of the module.

    Args:
        double: whether it computes in double precision.
        in_parts: how it is run in parts.
        pattern: what is drawn.
        outside: the values outside of the module that forward may change.
    """

    def __init__(
        self,
        module: nn.Module,
        cards: Sequence[Card],
        batch: Any,
        *,
        double: bool,
        in_parts: InParts = Spreader,
        pattern: int = 0,
        outside: Outside | None = None,
    ) -> None:
        self.cards = cards
        self._in_parts = in_parts
        self._outside = outside

        def own(tensor: Tensor) -> Tensor:
            copied = tensor.detach().clone()
            return (copied.double() if double and copied.is_floating_point() else copied).requires_grad_(
                tensor.requires_grad
            )

        with torch.inference_mode(False):
            self.batch = map_tensors(own, batch)
            self.module = ModuleCopier(module, cards[0].device).replica
            if double:
                self.module.double()
        self._given = self._input_state()
        self.draws = any(_draws(part) for part in self.module.modules())
        settle(self.module)
        self._watch = Watch(self.module)
        self._mode = PinnedDraws(pattern)
        self._host_draws = HostDraws(pattern)
        self.module.register_forward_pre_hook(self._host_draws.pin)
        self.module.register_forward_hook(self._host_draws.look)
        self._text = io.StringIO()
        self._spreader: RunsParts | None = None
        self._probing: Probing | None = None
        self.outputs: list[Tensor] = []
        self.written: dict[tuple[int, str], Any] = {}
        self._held = _held_in(self.module)
        self.keeps_graph = False
        """Whether forward keeps a tensor in an attribute whose graph is part of that of its outputs."""
        self._plain: dict[str, Any] = {}
        self._left_outside: dict[str, Any] = {}

    def run_whole(self) -> None:
        """Run it on the whole batch, on the primary card."""
        with self._observed():
            value = self.module(*self.batch[0], **self.batch[1])
        self._finish(value)

    def writes_input(self) -> bool:
        """Whether forward has changed a tensor that it was given, or a list, dict or object."""
        return not alike(self._input_state(), self._given, 0.0)

    def _input_state(self) -> Any:
        return [tensor._version for tensor in tensors_in(self.batch)], looks(self.batch)

    def run_spread(
        self, cut: Layout, sizes: Sequence[int], whole: Trial, known: Sequence[JoinRule], way: Way
    ) -> tuple[JoinRule, ...]:
        """Run it cut over the cards; gives the rules, `known` ones first, that join its outputs to those of `whole`.

        Args:
            way: what a part's draws are taken for.
        """
        self._spreader = self._in_parts(self.module, self.cards)
        self._mode.way, self._mode.prefer = way, _first_dim(cut)
        self._probing = probing = Probing(cut, whole.outputs, self.batch, sizes, known, self._mode)
        with self._observed(), CheckedIndices():
            value = self._spreader.call(self.batch[0], self.batch[1], sizes, probing)
        self._finish(value)
        if len(self.outputs) != len(whole.outputs):
            raise DifferentError("cutting it changes how many tensors it returns")
        return tuple(probing.rules)

    @property
    def counts(self) -> bool:
        """After a spread run: whether outputs hold whole numbers or words, the same on every card."""
        return self._probing is not None and self._probing.counts

    def other_rules(self) -> list[tuple[JoinRule, ...]]:
        """After a spread run: the other rules that join its outputs as well, but pass back other gradients."""
        assert self._probing is not None, "it has been run in parts"
        fitting = [self._probing.fitting(leaf) for leaf in range(len(self._probing.rules))]
        return list(itertools.islice(itertools.product(*fitting), 1, _MOST_RULES))

    @contextlib.contextmanager
    def _observed(self) -> Iterator[None]:
        """Draws are pinned, and what the primary prints is kept."""
        if self._outside is not None:
            self._outside.restore()
        try:
            with self._mode, contextlib.redirect_stdout(PrimaryOutput(self._text)):
                yield
        finally:
            if self._outside is not None:
                self._left_outside = self._outside.look()

    def close(self) -> None:
        """Let go of the threads that a spread run needed."""
        if self._spreader is not None:
            self._spreader.close()
        self._probing = None

    def _finish(self, value: Any) -> None:
        try:
            self.outputs = list(tensors_in(value))
        except BatchError as error:
            raise OpaqueError(str(error).partition(" Fix: ")[0].replace("the batch holds", "it returns", 1)) from None
        self._plain = beside_tensors(value)
        self._watch_state()
        varying = [output for output in self.outputs if output.requires_grad]
        if torch.is_grad_enabled() and varying:
            cotangents = [cotangent(number, output) for number, output in enumerate(varying)]
            with self._mode:  # checkpoints run forward again
                torch.autograd.backward(varying, cotangents)
                self.keeps_graph = any(map(self._is_freed, self.written.values()))
        self.draws = self.draws or self._mode.drawn or self._host_draws.drawn

    def _is_freed(self, value: Any) -> bool:
        """Whether a tensor's graph was let go of by the backward pass of others."""
        if not isinstance(value, Tensor) or value.grad_fn is None:
            return False
        try:
            torch.autograd.grad(value.sum(), list(self.module.parameters()), allow_unused=True)
        except RuntimeError:
            return True
        return False

    @property
    def drew(self) -> bool:
        """Whether forward has drawn anything but what to drop."""
        return self._mode.patterned or self._host_draws.drawn

    @property
    def permuted(self) -> bool:
        """Whether forward has drawn a permutation."""
        return self._mode.permuted

    def _watch_state(self) -> None:
        for change in self._watch.changes():
            self.written[(change.module, change.name)] = None if change.gone else self._watch.value(change)
        for key, value in _held_in(self.module).items():
            if key not in self.written and not alike(value, self._held.get(key), 0.0):
                self.written[key] = value

    def compare(self, other: Trial) -> None:
        """Compare the results of two runs.

        Raises:
            DifferentError: they differ; says in what.
        """
        self.compare_outside(other)
        for number, (own, others) in enumerate(zip(self.outputs, other.outputs, strict=True)):
            found = differ(own, others, tolerance_of(own))
            if found:
                raise DifferentError(f"cutting the batch changes output {number} ({found})")
        for place in {**self._plain, **other._plain}:
            if not alike(self._plain.get(place), other._plain.get(place)):
                kind = type(self._plain.get(place)).__name__
                raise DifferentError(f"cutting the batch changes what it returns besides tensors ({place}, {kind})")
        self._compare_gradients(other)
        self._compare_state(other)
        if self._text.getvalue() != other._text.getvalue():
            raise DifferentError("forward prints what it sees of the batch")

    def compare_outside(self, other: Trial) -> None:
        """Compare what two runs have changed outside of the module.

        Raises:
            DifferentError: it differs.
        """
        name = Outside.difference(self._left_outside, other._left_outside)
        if name:
            raise DifferentError(f"forward changes {name}, which is outside the module, in every card's part of a call")

    def _compare_gradients(self, other: Trial) -> None:
        named = list(self.module.named_parameters())
        largest = max((_largest(parameter.grad) for _, parameter in named), default=0.0)
        for (name, own), others in zip(named, other.module.parameters(), strict=True):
            found = _differ_in_gradient(own, others, largest)
            if found:
                raise DifferentGradientError(f"cutting the batch changes the gradient of {name} ({found})")
        inputs = list(tensors_in(self.batch))
        largest = max((_largest(tensor.grad) for tensor in inputs), default=0.0)
        for number, (tensor, another) in enumerate(zip(inputs, tensors_in(other.batch), strict=True)):
            found = _differ_in_gradient(tensor, another, largest)
            if found:
                raise DifferentGradientError(f"cutting the batch changes the gradient of input {number} ({found})")

    def _compare_state(self, other: Trial) -> None:
        for (name, buffer), others in zip(self.module.named_buffers(), other.module.buffers(), strict=True):
            if differ(buffer, others, tolerance_of(buffer)):
                raise DifferentError(f"forward computes buffer {name} from the whole batch")
        parts = list(self.module.modules())
        for key in {**self.written, **other.written}:
            missing = key not in self.written or key not in other.written
            if missing or not alike(self.written[key], other.written[key]):
                raise DifferentError(
                    f"forward keeps what it sees of the batch in {type(parts[key[0]]).__name__}.{key[1]}, which would"
                    " hold one card's part"
                )


def _held_in(module: nn.Module) -> dict[tuple[int, str], Any]:
    """How what the parts of a module hold in lists, dicts and objects looks."""
    return {
        (index, name): looks(value)
        for index, part in enumerate(module.modules())
        for name, value in list(vars(part).items())
        if not isinstance(value, (*PLAIN, *LEFT_OUT)) and name not in _REGISTERED
    }


def _first_dim(cut: Layout) -> int:
    """The dimension that counts samples in the first tensor that is cut."""
    dims = cut.dims if isinstance(cut, ByTensor) else ()
    return next((dim for dim in dims if dim is not None), cut.dim)


def _draws(part: nn.Module) -> bool:
    if isinstance(part, _DropoutNd):
        return part.training and part.p > 0
    dropout = getattr(part, "dropout", None)
    return part.training and isinstance(dropout, float) and dropout > 0


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
