"""One run of a copy of a module on one call, and how two runs are compared.

A trial leaves the script's module and inputs as they are. Draws are pinned, dropout and BatchNorm are put in evaluation
mode, and what the primary prints is kept. Compared are outputs, gradients of parameters and inputs, buffers,
attributes that forward wrote, and what it printed.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from manycard.cards.card import Card
from manycard.engine.batch import map_tensors, tensors_in
from manycard.engine.copying import ModuleCopier
from manycard.engine.joining import Join
from manycard.engine.layout import Layout, TakePiece
from manycard.engine.settling import settle
from manycard.engine.spreader import Spreader
from manycard.engine.watching import Watch
from manycard.script.comparison.closeness import differ, tolerance_of
from manycard.script.comparison.indices import CheckedIndices
from manycard.script.comparison.layout import ByTensor, JoinRule
from manycard.script.comparison.pinned import HostDraws, PinnedDraws, Way
from manycard.script.comparison.rules import rules_for
from manycard.script.means import InParts, RunsParts
from manycard.script.output import PrimaryOutput

__all__ = ["DifferentError", "DifferentGradientError", "Trial"]


_MOST_RULES = 12
"""Ways of joining one call's outputs that are tried."""


class DifferentError(Exception):
    """A way of cutting gives another result."""


class DifferentGradientError(DifferentError):
    """A way of cutting, or of joining what came out alike, gives other gradients.

    Attributes:
        other_rules: other ways of joining that fit the values, where they were looked for.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.other_rules: list[tuple[JoinRule, ...]] = []


class Trial:
    """One run of a copy of the module.

    Args:
        double: whether it computes in double precision.
        in_parts: how it is run in parts.
        pattern: what is drawn.
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
    ) -> None:
        self.cards = cards
        self._in_parts = in_parts

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
        self._versions = [tensor._version for tensor in tensors_in(self.batch)]
        self.draws = any(_draws(part) for part in self.module.modules())
        settle(self.module)
        self._watch = Watch(self.module)
        self._mode = PinnedDraws(pattern)
        self._host_draws = HostDraws(pattern)
        self.module.register_forward_pre_hook(self._host_draws.pin)
        self.module.register_forward_hook(self._host_draws.look)
        self._text = io.StringIO()
        self._spreader: RunsParts | None = None
        self._probing: _Probing | None = None
        self.outputs: list[Tensor] = []
        self.written: dict[tuple[int, str], Any] = {}

    def run_whole(self) -> None:
        """Run it on the whole batch, on the primary card."""
        with self._observed():
            value = self.module(*self.batch[0], **self.batch[1])
        self._finish(value)

    def writes_input(self) -> bool:
        """Whether forward has changed a tensor that it was given."""
        return [tensor._version for tensor in tensors_in(self.batch)] != self._versions

    def run_spread(
        self, cut: Layout, sizes: Sequence[int], whole: Trial, known: Sequence[JoinRule], way: Way
    ) -> tuple[JoinRule, ...]:
        """Run it cut over the cards; gives the rules, `known` ones first, that join its outputs to those of `whole`.

        Args:
            way: what a part's draws are taken for.
        """
        self._spreader = self._in_parts(self.module, self.cards)
        self._mode.way, self._mode.prefer = way, _first_dim(cut)
        self._probing = probing = _Probing(cut, whole.outputs, self.batch, sizes, known, self._mode)
        with self._observed(), CheckedIndices():
            value = self._spreader.call(self.batch[0], self.batch[1], sizes, probing)
        self._finish(value)
        if len(self.outputs) != len(whole.outputs):
            raise DifferentError("cutting it changes how many tensors it returns")
        return tuple(probing.rules)

    def other_rules(self) -> list[tuple[JoinRule, ...]]:
        """After a spread run: the other rules that join its outputs as well, but pass back other gradients."""
        assert self._probing is not None, "it has been run in parts"
        fitting = [self._probing.fitting(leaf) for leaf in range(len(self._probing.rules))]
        return list(itertools.islice(itertools.product(*fitting), 1, _MOST_RULES))

    @contextlib.contextmanager
    def _observed(self) -> Iterator[None]:
        """Draws are pinned, and what the primary prints is kept."""
        with self._mode, contextlib.redirect_stdout(PrimaryOutput(self._text)):
            yield

    def close(self) -> None:
        """Let go of the threads that a spread run needed."""
        if self._spreader is not None:
            self._spreader.close()
        self._probing = None

    def _finish(self, value: Any) -> None:
        self.outputs = list(tensors_in(value))
        self._watch_state()
        varying = [output for output in self.outputs if output.requires_grad]
        if torch.is_grad_enabled() and varying:
            cotangents = [_cotangent(number, output) for number, output in enumerate(varying)]
            with self._mode:  # checkpoints run forward again
                torch.autograd.backward(varying, cotangents)
        self.draws = self.draws or self._mode.drawn or self._host_draws.drawn

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

    def compare(self, other: Trial) -> None:
        """Compare the results of two runs.

        Raises:
            DifferentError: they differ; says in what.
        """
        for number, (own, others) in enumerate(zip(self.outputs, other.outputs, strict=True)):
            found = differ(own, others, tolerance_of(own))
            if found:
                raise DifferentError(f"cutting the batch changes output {number} ({found})")
        self._compare_gradients(other)
        self._compare_state(other)
        if self._text.getvalue() != other._text.getvalue():
            raise DifferentError("forward prints what it sees of the batch")

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
            if missing or not _same(self.written[key], other.written[key]):
                raise DifferentError(
                    f"forward keeps what it sees of the batch in {type(parts[key[0]]).__name__}.{key[1]}, which would"
                    " hold one card's part"
                )


class _Probing(Layout):
    """Cuts by `cut`, and finds for each output the rule that joins it to what one card gave."""

    def __init__(
        self,
        cut: Layout,
        outputs: Sequence[Tensor],
        batch: Any,
        sizes: Sequence[int],
        known: Sequence[JoinRule],
        draws: PinnedDraws,
    ) -> None:
        self.dim = cut.dim
        self._known = known
        self._batch = batch
        self._sizes = sizes
        self._cut = cut
        self._outputs = outputs
        self._draws = draws
        self._parts: list[tuple[Sequence[Tensor], Sequence[int]]] = []
        self.rules: list[JoinRule] = []

    def count(self, batch: Any) -> int:
        return self._cut.count(batch)

    def take_shard(self, batch: Any, sizes: Sequence[int], position: int, take: TakePiece) -> Any:
        self._draws.begin_part(sum(sizes[:position]), sizes[position], sum(sizes), position)
        return self._cut.take_shard(batch, sizes, position, take)

    def lists_samples(self, batch: Any, total: int) -> bool:
        return self._cut.lists_samples(batch, total)

    def plan_join(self, leaf: int, parts: Sequence[Tensor], samples: Sequence[int], name: str) -> Join:
        if leaf >= len(self._outputs):
            raise DifferentError("cutting it changes how many tensors it returns")
        self._parts.append(([part.detach() for part in parts], samples))
        whole = self._outputs[leaf].detach()
        found = "its shape doesn't follow the batch"
        for rule, join in self._joins(leaf):
            joined = self._joined(leaf, join)
            difference = differ(whole, joined, tolerance_of(whole))
            if difference is None:
                self.rules.append(rule)
                return join
            if joined.shape == whole.shape and found.startswith("its shape"):
                found = difference
        raise DifferentError(f"cutting the batch changes output {name} ({found})")

    def fitting(self, leaf: int) -> list[JoinRule]:
        """The rule that was found for an output, and those that give the same whole but pass back other gradients."""
        whole = self._outputs[leaf].detach()
        rules: list[JoinRule] = []
        passed_back: list[list[Tensor]] = []
        for rule, join in self._joins(leaf):
            joined = self._joined(leaf, join)
            if differ(whole, joined, tolerance_of(whole)) is not None:
                continue
            cotangent = _cotangent(0, joined) if joined.is_floating_point() else torch.ones_like(joined)
            gradients = [join.gradient(cotangent, index) for index in range(len(self._parts[leaf][0]))]
            if not any(all(map(_alike, gradients, others)) for others in passed_back):
                rules.append(rule)
                passed_back.append(gradients)
        return rules

    def _joins(self, leaf: int) -> Iterator[tuple[JoinRule, Join]]:
        """The rules whose shapes fit an output."""
        parts, samples = self._parts[leaf]
        known = self._known[leaf : leaf + 1]  # another rule may hold by coincidence in this call
        for rule in (*known, *rules_for(parts[0].dim(), self._batch)):
            join = rule.bind(self._batch, self._cut, self._sizes).plan(parts, samples)
            if join is not None:
                yield rule, join

    def _joined(self, leaf: int, join: Join) -> Tensor:
        device = self._outputs[leaf].device
        return join.join([part.to(device) for part in self._parts[leaf][0]])


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other)


def _first_dim(cut: Layout) -> int:
    """The dimension that counts samples in the first tensor that is cut."""
    dims = cut.dims if isinstance(cut, ByTensor) else ()
    return next((dim for dim in dims if dim is not None), cut.dim)


def _draws(part: nn.Module) -> bool:
    if isinstance(part, _DropoutNd):
        return part.training and part.p > 0
    dropout = getattr(part, "dropout", None)
    return part.training and isinstance(dropout, float) and dropout > 0


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
