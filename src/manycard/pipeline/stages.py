"""Which part of a model belongs to which stage: a plan by names, and the stages of one copy of the model by it.

Behaviour:
    * Parameters and buffers are moved to their stages' cards in place. They stay the objects they are, so optimizers,
      ties and ``state_dict`` know nothing of it.
    * Only while a batch is under way, each part's ``forward`` is led through `Stages`. Between batches the module is
      the script's own, without a trace of the pipeline in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manycard.cards.card import Card
from manycard.engine.replicas.watching import Watch
from manycard.errors import ModelError
from manycard.pipeline.attributes import settle_attributes
from manycard.pipeline.checkpoints import checkpointed
from manycard.pipeline.copies import StageCopies
from manycard.pipeline.passage import all_known, current_passage

__all__ = ["Part", "StagePlan", "Stages"]


@dataclass(frozen=True)
class Part:
    """A module that runs on one card as a whole."""

    name: str
    """Its name in the model; empty for the model itself."""
    stage: int
    begins: bool = False
    """Whether its stage begins with it."""


@dataclass(frozen=True)
class StagePlan:
    """Where everything in a model belongs, by name."""

    stages: int
    parts: tuple[Part, ...]
    """In the order in which they first run."""
    homes: dict[str, int]
    """The stage of each parameter and buffer; those not in it belong to stage 0."""

    def starts(self) -> list[str]:
        """The names of the modules with which stages 1, 2, ... begin."""
        return [part.name for part in self.parts if part.begins]

    def names(self, stage: int) -> str:
        """The parts of a stage, in words."""
        names = [part.name or "the model" for part in self.parts if part.stage == stage]
        return f"{names[0]} to {names[-1]}" if len(names) > 1 else (names or ["nothing"])[0]


class Stages:
    """The stages of one copy of the model, on their cards.

    Args:
        module: the model, or a copy of it; its parameters are moved.
        plan: where they go.
        cards: the card of each stage.
        checkpointed: recompute each part's activations in its backward pass.
        original: the script's own model, where `module` is a copy of it.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: StagePlan,
        cards: Sequence[Card],
        *,
        checkpointed: bool,
        original: nn.Module | None = None,
    ) -> None:
        self.module = module
        self.plan = plan
        self.cards = tuple(cards)
        self.copies = StageCopies(cards)
        self.home_of: dict[int, int] = {}
        self._checkpointed = checkpointed
        self._original = original
        self._watch: Watch | None = None
        self._parts: list[tuple[Part, nn.Module]] = []
        self.place()

    def place(self) -> None:
        """Move every parameter and buffer to its stage's card, where it isn't there, and learn anew which they are."""
        homes = self.plan.homes
        self._parts = [(part, self._find(part.name)) for part in self.plan.parts]
        self.home_of = {}
        moved = False
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            stage = homes.get(name, 0)
            self.home_of[id(tensor)] = stage
            moved = move_to(tensor, self.cards[stage].device) or moved
        self._held = list(self._tensors())
        if moved:
            for part in self.module.modules():
                if isinstance(part, nn.RNNBase):
                    # cuDNN wants an RNN's weights in one chunk of memory.
                    part.flatten_parameters()
        self._settle_attributes()
        self._watch = Watch(self.module) if self.copies.real else None

    def _settle_attributes(self) -> None:
        """Bring home what modules keep as plain attributes, and learn which parts use nothing of another stage."""
        stage_of = {id(inner): part.stage for part, own in self._parts for inner in own.modules()}
        devices = [card.device for card in self.cards]
        strangers = settle_attributes(self.module, stage_of, self.home_of, devices, self._original)
        self._local = {
            part.name: all(self.home_of[id(tensor)] == part.stage for tensor in [*own.parameters(), *own.buffers()])
            and strangers.isdisjoint(map(id, own.modules()))
            for part, own in self._parts
        }

    def _find(self, name: str) -> nn.Module:
        try:
            return self.module.get_submodule(name)
        except AttributeError as error:
            raise ModelError(
                f"module {name} is gone, which was a part of the pipeline",
                fix="change the model's layers before the Pipeline is made",
            ) from error

    def _tensors(self) -> Iterator[Tensor]:
        yield from self.module.parameters()
        yield from self.module.buffers()

    def follow(self) -> None:
        """Bring home what the script has replaced or moved since."""
        tensors = list(self._tensors())
        same = len(tensors) == len(self._held) and all(a is b for a, b in zip(tensors, self._held, strict=True))
        moved = not same or any(each.device != self.cards[self.home_of[id(each)]].device for each in tensors)
        if moved or any(self._find(part.name) is not own for part, own in self._parts):
            self.place()
        elif self._watch is not None and (self._watch.structure_changed() or self._watch.changes()):
            self._settle_attributes()

    def parameters_of(self, stage: int) -> list[nn.Parameter]:
        """The parameters whose home is `stage`."""
        return [parameter for parameter in self.module.parameters() if self.home_of[id(parameter)] == stage]

    def lead(self, before: list[tuple[nn.Module, str, Any]]) -> None:
        """From now on, calls of the parts change cards and bring what they need.

        Args:
            before: filled with what `unlead` needs, whenever an interrupt comes.
        """
        for part, module in self._parts:
            # A module compiled by its own compile() calls this instead of forward.
            name = "forward" if module.__dict__.get("_compiled_call_impl") is None else "_compiled_call_impl"
            before.append((module, name, module.__dict__.get(name)))
            module.__dict__[name] = partial(self._enter, part, module, getattr(module, name))

    @staticmethod
    def unlead(before: list[tuple[nn.Module, str, Any]]) -> None:
        """Let the parts be as they were."""
        for module, name, value in before:
            if value is None:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = value

    def _enter(self, part: Part, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The ``forward`` of a part while a batch is under way."""
        passage = current_passage()
        if passage is None:
            return original(*args, **kwargs)
        if part.begins and passage.stage < part.stage:
            passage.advance(part.stage, (args, kwargs))
        args, kwargs = passage.bring((args, kwargs))
        at_home = passage.stage == part.stage and self._local[part.name]
        if not at_home or not (all_known(args) and all_known(kwargs)):
            return original(*args, **kwargs)
        work = original
        if self._checkpointed and torch.is_grad_enabled():
            work = checkpointed(module, original)
        return passage.unwatched(work, args, kwargs)


def move_to(tensor: Tensor, device: torch.device) -> bool:
    """Put a parameter or buffer, and its gradient, on a card in place; whether it was elsewhere."""
    if tensor.device == device:
        return False
    tensor.data = tensor.data.to(device)
    if tensor.grad is not None:
        tensor.grad.data = tensor.grad.data.to(device)
    return True
