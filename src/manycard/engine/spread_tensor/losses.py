"""Losses of spread outputs: each card computes the loss of its own part, on a graph of its own.

Behaviour:
    * Targets are cut as the outputs are. The loss is that of the whole batch: sums are added up, means are weighted by
      what they are really divided by (entries that aren't ignored, with their class weights).
    * A loss is one node of the script's graph. Its backward pass runs each card's own from that card's thread, and
      gives a spread gradient. A pass that is to be differentiated again (``create_graph=True``) runs on wholes.
    * What is not covered (other shapes, deprecated arguments, weights that require gradients, targets elsewhere) is
      left to PyTorch, on wholes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from manycard.engine.driving.local_backward import USED_TWICE, local_gradients
from manycard.engine.driving.spans import span
from manycard.engine.spread_tensor.held import NOT_SPREAD, Held, Rows
from manycard.engine.spread_tensor.tensor import FUNCTIONS, SpreadTensor, plain

__all__: list[str] = []

_HALF = (torch.bfloat16, torch.float16)
_CUT = ("input", "target")
"""The arguments that hold samples; others go to every card as they are."""
_CLASSES = (F.cross_entropy, F.nll_loss)
"""Losses of a target that names classes."""
_DIFFERENCES = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
)
"""Losses of a target as large as the output, number by number."""


@dataclass
class _Loss:
    """One call of a loss function."""

    function: Callable[..., Tensor]
    settings: dict[str, Any]
    """Its arguments that are no tensors."""
    names: tuple[str, ...]
    """Its arguments that are tensors, in order."""
    like: Held
    """The spread output (or target) by which tensors are cut."""
    counted: bool
    """Whether a mean is divided by what the targets say."""
    leaves: list[list[Tensor]] = field(default_factory=list)
    """Each card's tensors, at which its graph begins."""
    values: list[Tensor] = field(default_factory=list)
    """Each card's loss: of its samples, or one for each."""
    total: Tensor | None = None
    """What a mean is divided by, on the card of the whole."""
    dtype: torch.dtype | None = None
    """The loss's, where it isn't that of `values`."""
    spent: bool = False
    """Whether the cards' graphs are gone."""

    @property
    def rows(self) -> Rows:
        """Where the cards' parts lie."""
        return self.like.rows

    @property
    def reduction(self) -> str:
        """``mean``, ``sum``, ``batchmean`` or ``none``."""
        return str(self.settings["reduction"])

    # ---- forward -------------------------------------------------------------------------------------------

    def run(self, tensors: Sequence[Tensor]) -> Tensor:
        """The loss of the whole batch, without a graph; each card's graph is kept where gradients are wanted."""
        self.leaves = self._cut(tensors)
        counts: list[Tensor] = []
        for index, of_card in enumerate(self.leaves):
            with torch.enable_grad() if any(leaf.requires_grad for leaf in of_card) else torch.no_grad():
                self.values.append(self._value(of_card))
            if self.counted and self.reduction == "mean":
                with torch.no_grad():
                    counts.append(self._count(of_card))
            assert self.values[index].device == of_card[0].device, "a card's loss is on that card"
        with torch.no_grad():
            return self._joined(counts)

    def _cut(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Each card's part of every tensor, the copies apart from what cards compute."""
        home = self.like.home
        with home.copies.apart():
            pairs = list(zip(self.names, tensors, strict=True))
            ahead = [[self._piece(*pair, index) for pair in pairs] for index in range(len(self.rows.lengths))]
        return [
            [
                piece.to(home.devices[position], non_blocking=True).requires_grad_(tensor.requires_grad)
                for piece, tensor in zip(pieces, tensors, strict=True)
            ]
            for pieces, position in zip(ahead, self.rows.positions, strict=True)
        ]

    def _piece(self, name: str, tensor: Tensor, index: int) -> Tensor:
        if isinstance(tensor, SpreadTensor) and tensor.held.spread:
            return tensor.held.parts[index].detach()
        own = tensor.held.gather() if isinstance(tensor, SpreadTensor) else tensor.detach()
        if name in _CUT:
            own = self.rows.of(own, index)
        return self.like.home.copies.ahead(own, self.like.home.devices[self.rows.positions[index]]).detach()

    def _value(self, tensors: Sequence[Tensor]) -> Tensor:
        named = dict(zip(self.names, tensors, strict=True))
        if not self.counted:
            return self._call(named, {})
        each = self._call(named, {"reduction": "none"})
        self.dtype = each.dtype
        if self.reduction == "none":
            return each
        return each.sum(dtype=torch.float32 if each.dtype in _HALF else each.dtype)

    def _call(self, tensors: dict[str, Tensor], settings: dict[str, Any]) -> Tensor:
        value: Tensor = self.function(**tensors, **{**self.settings, **settings})
        return value

    def _count(self, tensors: Sequence[Tensor]) -> Tensor:
        """What a card's mean would be divided by: its entries that count, with the weights of their classes."""
        named = dict(zip(self.names, tensors, strict=True))
        target, weight = named["target"], named.get("weight")
        if target.is_floating_point():
            return torch.full((), target.numel() / target.size(1), dtype=torch.float64, device=target.device)
        counts = target != self.settings["ignore_index"]
        total: Tensor = counts.sum()
        if weight is None:
            return total
        return weight[torch.where(counts, target, 0).long()].masked_fill(~counts, 0).sum(dtype=torch.float64)

    def _joined(self, counts: Sequence[Tensor]) -> Tensor:
        device = self.like.home.device
        there = [value.detach().to(device, non_blocking=True) for value in self.values]
        if self.reduction == "none":
            return torch.cat(there)
        weights = self._weights()
        short = there[0].dtype in _HALF
        total = torch.zeros((), dtype=torch.float32 if short else there[0].dtype, device=device)
        for value, weight in zip(there, weights, strict=True):
            total = total + value.to(total.dtype) * weight
        if counts:
            self.total = torch.stack([count.to(device, non_blocking=True) for count in counts]).sum().to(total.dtype)
            total = total / self.total
        return total.to(self.dtype or there[0].dtype)

    def _weights(self) -> list[float]:
        """What each card's value counts."""
        if self.counted or self.reduction == "sum":
            return [1.0] * len(self.values)
        return [length / self.rows.total for length in self.rows.lengths]

    # ---- backward ------------------------------------------------------------------------------------------

    def backward(self, gradient: Tensor, spread: Sequence[bool]) -> list[Tensor | None]:
        """The gradients of the loss's tensors: spread for those that were, whole for others."""
        if self.spent:
            raise RuntimeError(USED_TWICE)
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        of_values = self._of_values(gradient)
        home, jobs = self.like.home, dict[int, Callable[[], list[Tensor | None]]]()
        for index, position in enumerate(self.rows.positions):
            jobs[position] = partial(self._backward_part, index, of_values[index], keep)
        here = home.position if home.position in jobs else None
        with span("backward"):
            found = home.threads.run([jobs.get(position) for position in range(len(home.devices))], here=here)
        of_parts = [found[position] for position in self.rows.positions]
        if not keep:
            self.spent, self.leaves, self.values = True, [], []
        return [self._whole(column, stays) for column, stays in zip(zip(*of_parts, strict=True), spread, strict=True)]

    def _of_values(self, gradient: Tensor) -> list[Tensor]:
        """The gradient of each card's value on that card, given the loss's.

        Sent before any card computes: a card's own thread could queue it behind the backward pass of the card it is on.
        """
        if isinstance(gradient, SpreadTensor):
            gradient = gradient.held.read()
        if self.reduction == "none":
            own = [self.rows.on(0).of(gradient, index) for index in range(len(self.values))]
        else:
            if self.total is not None:
                gradient = gradient.to(self.total.dtype) / self.total
            own = [
                gradient.to(value.dtype) * weight for value, weight in zip(self.values, self._weights(), strict=True)
            ]
        return [each.to(value.device, non_blocking=True) for each, value in zip(own, self.values, strict=True)]

    def _backward_part(self, index: int, of_value: Tensor, keep: bool) -> list[Tensor | None]:
        return local_gradients([self.values[index]], [of_value], self.leaves[index], keep=keep, accumulate=False)

    def _whole(self, parts: Sequence[Tensor | None], stays: bool) -> Tensor | None:
        """One tensor's gradient, given the parts'."""
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            return None
        made = Held.of_parts(self.like.home, self.rows, found)
        return SpreadTensor(made) if stays else made.joined(self.like.home.device)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: _Loss, *tensors: Tensor) -> Tensor:
        ctx.loss = loss
        ctx.save_for_backward(*tensors)
        ctx.spread = [isinstance(tensor, SpreadTensor) and tensor.held.spread for tensor in tensors]
        return loss.run(tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return None, *_differentiable(ctx.loss, ctx.saved_tensors, gradient)
        return None, *ctx.loss.backward(gradient, ctx.spread)


def _differentiable(loss: _Loss, tensors: Sequence[Tensor], gradient: Tensor) -> list[Tensor | None]:
    """The gradients as functions of `tensors` and `gradient`, computed on wholes."""
    with torch.enable_grad():
        own = [plain(tensor) if isinstance(tensor, SpreadTensor) else tensor.view_as(tensor) for tensor in tensors]
        value = loss.function(**dict(zip(loss.names, own, strict=True)), **loss.settings)
        wanted = [tensor for tensor in own if tensor.requires_grad]
        found = iter(torch.autograd.grad(value, wanted, gradient, create_graph=True, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in own]


# ---- which calls are covered -----------------------------------------------------------------------------------------


def _spread_loss(function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The loss on spread parts; `NOT_SPREAD` where PyTorch is to compute it on wholes."""
    try:
        bound = _SIGNATURES[function].bind(*args, **kwargs)
    except TypeError:
        return NOT_SPREAD  # and PyTorch says what is wrong
    bound.apply_defaults()
    given = bound.arguments
    if given.pop("size_average", None) is not None or given.pop("reduce", None) is not None:
        return NOT_SPREAD
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    settings = {name: value for name, value in given.items() if name not in tensors}
    like = _like(tensors)
    if like is None or not _covers(function, tensors, settings, like):
        return NOT_SPREAD
    loss = _Loss(function, settings, tuple(tensors), like, function in _CLASSES)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors.values()):
        return _Node.apply(loss, *tensors.values())
    return loss.run([tensor.detach() for tensor in tensors.values()])


def _like(tensors: dict[str, Tensor]) -> Held | None:
    """The spread tensor that says how others are cut; None unless all that are spread agree."""
    spread = [tensor.held for tensor in tensors.values() if isinstance(tensor, SpreadTensor) and tensor.held.spread]
    if not spread or "target" not in tensors or any(held.rows.dim for held in spread):
        return None
    return spread[0] if all(spread[0].lies_as(held.rows, held.home) for held in spread) else None


def _covers(function: Any, tensors: dict[str, Tensor], settings: dict[str, Any], like: Held) -> bool:
    """Whether a call is one that cutting computes exactly."""
    output, target = tensors.get("input"), tensors["target"]
    if output is None or output.dim() == 0 or not output.is_floating_point():
        return False
    for name, tensor in tensors.items():
        if tensor.device != like.home.device or tensor.layout is not torch.strided:
            return False
        if name not in _CUT and (tensor.requires_grad or not _goes_to_all(tensor, output)):
            return False
    reduction = settings.get("reduction")
    if function in _CLASSES:
        return reduction in ("mean", "sum", "none") and _names_classes(output, target, settings)
    allowed = ("mean", "sum", "batchmean") if function is F.kl_div else ("mean", "sum")
    return reduction in allowed and target.shape == output.shape and target.is_floating_point()


def _goes_to_all(weight: Tensor, output: Tensor) -> bool:
    """Whether a weight says nothing of single samples."""
    return weight.dim() < output.dim() and not isinstance(weight, SpreadTensor)


def _names_classes(output: Tensor, target: Tensor, settings: dict[str, Any]) -> bool:
    if output.dim() < 2:
        return False
    if target.is_floating_point():
        return target.shape == output.shape and "label_smoothing" in settings
    return target.shape == (output.size(0), *output.shape[2:]) and math.prod(target.shape) > 0


_SIGNATURES = {function: inspect.signature(function) for function in (*_CLASSES, *_DIFFERENCES)}
FUNCTIONS.update({function: partial(_spread_loss, function) for function in _SIGNATURES})
