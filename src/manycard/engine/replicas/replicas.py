"""The replicas of one module: a copy on every card but the primary's, kept like the primary.

Behaviour:
    * Replicas are made once, by the first call that needs them, and made anew when the module's structure changes.
    * `follow` brings attributes and flags that the script changed to the replicas. What the forward pass itself
      writes stays as each card has it; the primary's is what the script sees.
    * `send_parameters` always sends: fused optimizers and writes through ``.data`` leave no trace that could tell
      whether it is needed. A forward pass may still await its backward pass then. On one card, its backward would
      use the parameters as they are by that time, or raise where PyTorch sees that they changed in place; the
      replicas' do the same, because the new values go into the same tensors, and their version counters move
      exactly when the primary's have moved.
    * The primary's buffers are the truth: they are sent before a forward pass, resolved by name each time, so that
      a buffer the module replaces is followed too.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from manycard.cards.card import Card
from manycard.engine.replicas.collective import Collective
from manycard.engine.replicas.copying import ModuleCopier
from manycard.engine.replicas.flat import FlatLayout, copy_all
from manycard.engine.replicas.watching import AttributeChange, Watch
from manycard.errors import LockstepError

__all__ = ["Replicas"]


class Replicas:
    """One module on several cards.

    Args:
        module: the user's module; it is the primary's replica itself.
        cards: where replicas live, the primary first.
        collective: how buffers move between the cards.
    """

    def __init__(self, module: nn.Module, cards: Sequence[Card], collective: Collective) -> None:
        self.module = module
        self.cards = tuple(cards)
        self.generation = 0
        """Moves whenever replicas are made anew."""
        self.changes = 0
        """How often the script has changed the module in another way than between training and evaluation."""
        self.modes: tuple[bool, ...] = ()
        """Of each submodule, whether it trains."""
        self.modules: list[nn.Module] = [module]
        self.parameters: list[list[nn.Parameter]] = []
        """Each card's parameters, in the order of ``module.parameters()``."""
        self._collective = collective
        self._copiers: list[ModuleCopier] = []
        self._watch: Watch | None = None
        self._parts: list[list[nn.Module]] = []
        self._kinds: list[Any] = []
        self._parameter_layout: FlatLayout | None = None
        self._buffer_layout: tuple[list[Any], FlatLayout] | None = None
        self._sent_versions: list[int] = []
        self._said: set[str] = set()

    @property
    def lazy(self) -> bool:
        """Whether a parameter still waits for its shape."""
        return any(is_lazy(parameter) for parameter in self.module.parameters())

    def follow(self) -> set[str]:
        """Make replicas where there are none, and bring what the script changed to those there are.

        Returns:
            The names of the attributes that the script changed; ``"structure"`` where replicas were made anew.
        """
        if self._watch is None or self._watch.structure_changed() or self._kinds != _kinds(self.parameters[0]):
            self._make()
            return self._noted({"structure"})
        changes = self._watch.changes()
        for copier, modules in zip(self._copiers, self._parts[1:], strict=True):
            for change in changes:
                if change.gone:
                    modules[change.module].__dict__.pop(change.name, None)
                else:
                    with torch.inference_mode(False):
                        value = copier.copy_of(self._watch.value(change), change.name)
                    modules[change.module].__dict__[change.name] = value
        self._follow_flags()
        return self._noted({change.name for change in changes})

    def _noted(self, changed: set[str]) -> set[str]:
        if changed:
            self.changes += changed != {"training"}
            self.modes = tuple(part.training for part in self.module.modules())
        return changed

    def absorb(self) -> list[str]:
        """Take note of what a forward pass wrote on the primary, and say once which of it differs between cards.

        Returns:
            The attributes that it wrote, as ``Class.name``.
        """
        if self._watch is None:
            return []
        changes = self._watch.changes()
        for change in changes:
            if change.name not in self._said and not change.gone:
                self._compare(change)
        return [f"{type(self._parts[0][change.module]).__name__}.{change.name}" for change in changes]

    def _compare(self, change: AttributeChange) -> None:
        """Warn about a plain number or string that a forward pass left different on another card."""
        held = [parts[change.module].__dict__.get(change.name) for parts in self._parts]
        if isinstance(held[0], bool | int | float | str) and any(other != held[0] for other in held[1:]):
            self._said.add(change.name)
            warnings.warn(
                f"forward writes {type(self._parts[0][change.module]).__name__}.{change.name} from what it sees of the"
                f" batch, which differs between cards: the script sees {self.cards[0]}'s",
                stacklevel=2,
            )

    def _make(self) -> None:
        # Made in inference mode they could never be trained.
        with torch.inference_mode(False):
            self._make_all()

    def _make_all(self) -> None:
        self._copiers = [ModuleCopier(self.module, card.device) for card in self.cards[1:]]
        self.modules = [self.module, *(copier.replica for copier in self._copiers)]
        for replica in self.modules[1:]:
            for part in replica.modules():
                if isinstance(part, nn.RNNBase):
                    # cuDNN wants an RNN's weights in one chunk of memory, which copies of each are not.
                    part.flatten_parameters()
        self.parameters = [list(replica.parameters()) for replica in self.modules]
        self._parts = [list(replica.modules()) for replica in self.modules]
        self._kinds = _kinds(self.parameters[0])
        self._parameter_layout = FlatLayout(self.parameters[0])
        self._buffer_layout = None
        self._sent_versions = self._versions()
        self._watch = Watch(self.module)
        self.generation += 1

    def _follow_flags(self) -> None:
        for replica in self.parameters[1:]:
            for own, primary in zip(replica, self.parameters[0], strict=True):
                if own.requires_grad != primary.requires_grad:
                    own.requires_grad_(primary.requires_grad)

    def addresses(self) -> list[int]:
        """Where the primary's parameters and buffers lie, which a script that assigns ``.data`` changes."""
        found = [parameter.data_ptr() for parameter in self.parameters[0]]
        for part in self._parts[0]:
            found.extend(buffer.data_ptr() for buffer in part._buffers.values() if buffer is not None)
        return found

    # ---- parameters ----------------------------------------------------------------------------------------

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self.parameters[0]]

    @property
    def moved(self) -> bool:
        """Whether the primary's parameters were written in a way PyTorch counts, since they were last sent."""
        return self._versions() != self._sent_versions

    def mark_sent(self) -> None:
        """Take the replicas' parameters for equal to the primary's as they are now."""
        self._sent_versions = self._versions()

    def send_parameters(self) -> None:
        """Write the primary's parameters into every replica's."""
        if len(self.cards) > 1 and self.parameters[0]:
            assert self._parameter_layout is not None, "follow() comes before send_parameters()"
            moved = [now != sent for now, sent in zip(self._versions(), self._sent_versions, strict=True)]
            values = [
                [own.detach() if counted else own.data for own, counted in zip(replica, moved, strict=True)]
                for replica in self.parameters
            ]
            self._send(values, self._parameter_layout)
        self.mark_sent()

    # ---- buffers -------------------------------------------------------------------------------------------

    def send_buffers(self, *, statistics: bool) -> None:
        """Write the primary's buffers into every replica's.

        Args:
            statistics: also the running statistics of BatchNorm layers in training mode, which no forward pass
                in that mode reads.
        """
        if len(self.cards) == 1:
            return
        names = self._buffer_names(statistics)
        if not names:
            return
        values = [[modules[index]._buffers[name] for index, name in names] for modules in self._parts]
        tensors: list[list[Tensor]] = [[value.data for value in card if value is not None] for card in values]
        if any(_kinds(card) != _kinds(tensors[0]) for card in tensors[1:]):
            self._make()
        elif tensors[0]:
            kinds = _kinds(tensors[0])
            if self._buffer_layout is None or self._buffer_layout[0] != kinds:
                self._buffer_layout = (kinds, FlatLayout(tensors[0]))
            self._send(tensors, self._buffer_layout[1])

    def _buffer_names(self, statistics: bool) -> list[tuple[int, str]]:
        return [
            (index, name)
            for index, part in enumerate(self._parts[0])
            if part._buffers and (statistics or not (isinstance(part, _BatchNorm) and part.training))
            for name in part._buffers
        ]

    # ---- both ----------------------------------------------------------------------------------------------

    def _send(self, values: list[list[Tensor]], layout: FlatLayout) -> None:
        """Copy the first card's tensors into the other cards'."""
        with torch.no_grad():
            if all(card.simulated for card in self.cards):
                for card in values[1:]:
                    copy_all(card, values[0], layout.groups)
                return
            buffers = [layout.allocate(card.device) for card in self.cards]
            copy_all(layout.views(buffers[0]), values[0], layout.groups)
            for dtype in layout.groups:
                self._collective.broadcast([buffer[dtype] for buffer in buffers])
            for tensors, buffer in zip(values[1:], buffers[1:], strict=True):
                copy_all(tensors, layout.views(buffer), layout.groups)

    def check_lockstep(self) -> None:
        """Compare every replica's parameters with the primary's, bit by bit.

        Raises:
            LockstepError: one differs.
        """
        names = [name for name, _ in self.module.named_parameters()]
        for card, replica in zip(self.cards[1:], self.parameters[1:], strict=False):
            for name, own, primary in zip(names, replica, self.parameters[0], strict=True):
                if not same_bits(primary, own):
                    largest = (primary.detach().cpu() - own.detach().cpu()).abs().max().item()
                    raise LockstepError(
                        f"parameter {name} differs between {self.cards[0]} and {card} by up to {largest:.3g}",
                        fix="report it with the script: replicas must be bit-equal after every step",
                    )


def _kinds(tensors: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    """What must be equal for one tensor to be copied into another as it is."""
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bits, NaN and signed zeros included."""
    flat = [tensor.detach().cpu().reshape(-1).contiguous() for tensor in (one, other)]
    return torch.equal(flat[0].view(torch.uint8), flat[1].view(torch.uint8))
