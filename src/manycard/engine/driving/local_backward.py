"""The backward pass of one card's own graph, inside the backward pass of the script's.

Behaviour:
    * Gradients are handed back, and the ``grad`` of leaves is as it was, also when the pass fails.
    * Hooks of the script's parameters don't run: they are for the whole gradient, which the script's graph has later.
    * A leaf that the script has frozen since the forward pass, or that the pass doesn't reach, has None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["USED_TWICE", "local_gradients"]

USED_TWICE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been"
    " freed). Specify retain_graph=True if you need to backward through the graph a second time."
)
"""What PyTorch says of a graph that is gone."""


def local_gradients(
    roots: Sequence[Tensor],
    of_roots: Sequence[Tensor],
    leaves: Sequence[Tensor],
    *,
    keep: bool,
    accumulate: bool,
    hooked: Sequence[Tensor] = (),
) -> list[Tensor | None]:
    """Differentiate `roots` with respect to `leaves`.

    Args:
        of_roots: the gradients of `roots`.
        keep: whether the graph is needed again.
        accumulate: go by way of ``grad``, which reentrant checkpoints need.
        hooked: leaves whose hooks are set aside.
    """
    found: list[Tensor | None] = [None] * len(leaves)
    wanted = [index for index, leaf in enumerate(leaves) if leaf.requires_grad]
    if not roots or not wanted:
        return found
    differentiate = _accumulated if accumulate else torch.autograd.grad
    suspended = _suspend_hooks(hooked)
    try:
        wrt = [leaves[index] for index in wanted]
        gradients = differentiate(roots, wrt, of_roots, retain_graph=keep, allow_unused=True)
    finally:
        for registered, held in suspended:
            registered.update(held)
    for index, gradient in zip(wanted, gradients, strict=True):
        found[index] = gradient
    return found


def _accumulated(
    roots: Sequence[Tensor],
    leaves: Sequence[Tensor],
    of_roots: Sequence[Tensor],
    *,
    retain_graph: bool,
    allow_unused: bool,
) -> list[Tensor | None]:
    """`torch.autograd.grad` by way of ``grad``; puts back what ``grad`` held."""
    kept = [leaf.grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(roots, of_roots, retain_graph=retain_graph)
        return [leaf.grad for leaf in leaves]
    finally:
        for leaf, gradient in zip(leaves, kept, strict=True):
            leaf.grad = gradient


def _suspend_hooks(parameters: Sequence[Tensor]) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    """Empty the tensors' hook tables, so that hooks run once, on the whole gradient."""
    tables = [parameter._backward_hooks for parameter in parameters]
    tables += [parameter._post_accumulate_grad_hooks for parameter in parameters]
    suspended = [(table, dict(table)) for table in tables if table]
    for table, _ in suspended:
        table.clear()
    return suspended
