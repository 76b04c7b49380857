"""A spread call's backward pass that can itself be differentiated (``create_graph=True``).

The cards' own graphs are hidden from autograd. So forward runs again, with the draws of the first time, as a function
of the whole inputs and the primary's parameters, on one graph that spans the cards. What it writes is taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import functional_call

from manycard.engine.batches.batch import tensors_in
from manycard.engine.batches.layout import Piece
from manycard.engine.replicas.sync_batchnorm import SyncedBatchNorm
from manycard.errors import ModelError

if TYPE_CHECKING:
    from manycard.engine.calls.boundary import SpreadCall

__all__ = ["backward_with_graph"]


def backward_with_graph(
    call: SpreadCall, saved: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """As `SpreadCall.backward`, on a graph of its own.

    Args:
        saved: the whole inputs that require gradients, and the primary's parameters.
        gradients: those of the joined outputs.

    Raises:
        ModelError: cards talk to each other in forward.
    """
    if any(isinstance(part, SyncedBatchNorm) for part in call.engine.replicas.module.modules()):
        raise ModelError(
            "create_graph=True doesn't go through BatchNorm synchronised between cards",
            fix="use GroupNorm or LayerNorm in the part that needs a gradient of a gradient",
        )
    wholes = [tensor.view_as(tensor) for tensor in saved]
    # What the script has frozen since the forward pass gets no gradient.
    wanted = [index for index, whole in enumerate(wholes) if whole.requires_grad]
    total: list[Tensor | None] = [None] * len(wholes)
    with call.engine.generators.preserved():
        call.engine.generators.load_state_dict(call.draws[0])
        torch.set_rng_state(call.draws[1])
        outputs = {position: _repeat(call, position, wholes) for position in call.active}
    for position in call.active:
        roots, of_roots = [], []
        for part, whole, leaf, index in call.parts_of(position, gradients, outputs[position]):
            roots.append(part)
            of_roots.append(leaf.gradient(whole, index).to(part.device))
        if roots:
            wrt = [wholes[index] for index in wanted]
            found = torch.autograd.grad(roots, wrt, of_roots, create_graph=True, allow_unused=True)
            for index, gradient in zip(wanted, found, strict=True):
                before = total[index]
                total[index] = gradient if before is None else before if gradient is None else before + gradient
    return total


def _repeat(call: SpreadCall, position: int, wholes: Sequence[Tensor]) -> list[Tensor]:
    """Run one card's forward pass again, as a function of the whole inputs and the primary's parameters."""
    device, module = call.engine.cards[position].device, call.engine.replicas.modules[position]
    inputs = {id(tensor): wholes[index] for index, tensor in enumerate(call.whole)}

    def take(tensor: Tensor, piece: Piece | None) -> Tensor:
        tensor = inputs.get(id(tensor), tensor)
        return (tensor if piece is None else piece.of(tensor)).to(device)

    chosen = {id(parameter) for parameter in call.parameters[position]}
    names = [name for name, parameter in module.named_parameters() if id(parameter) in chosen]
    swapped = dict(zip(names, (whole.to(device) for whole in wholes[len(call.whole) :]), strict=True))
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    written = [(part, dict(part.__dict__)) for part in module.modules()]
    call.engine.generators.enter(position)
    try:
        with call.context.entered(device), torch.enable_grad():
            args, kwargs = call.layout.take_shard(call.batch, call.sizes, position, take)
            value = functional_call(module, {**swapped, **buffers}, args, kwargs)
    finally:
        call.engine.generators.leave(position)
        # This forward pass is no step of the script's: what it wrote is taken back.
        for part, attributes in written:
            part.__dict__.clear()
            part.__dict__.update(attributes)
    return list(tensors_in(value))
