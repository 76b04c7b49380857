"""What each card's memory is for, and why one holds more than another. Reading is apart from judging, which is pure.

parameters, buffers, gradients, optimizer   tensors of the models and optimizers that were set up, and copies
activations                                 of a GPU's peak, what none of those were: forward's, and temporaries
other                                       what is held now and is none of those
fragments                                   what the allocator has reserved and never gave out at once
outside                                     used on the card, and not by this process's allocator: contexts, others
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manycard.cards import in_words
from manycard.diagnosis.finding import Finding
from manycard.diagnosis.memory_use.fragments import Reserve, judge_fragments, read_reserve
from manycard.diagnosis.memory_use.live import bytes_of, live_tensors

__all__ = ["CardMemory", "Held", "held_by", "judge_memory", "read_memory"]

_LEAST = 64 * 2**20
_UNEQUAL = 1.2
_CONTEXT = 700 * 2**20
"""What a process's context takes on a card without any tensor, at most."""


@dataclass(frozen=True)
class Held:
    """What a card holds for the run, as tensors."""

    parameters: tuple[Tensor, ...] = ()
    buffers: tuple[Tensor, ...] = ()
    gradients: tuple[Tensor, ...] = ()
    optimizer: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class CardMemory:
    """One card's memory, in bytes."""

    card: str
    simulated: bool
    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    other: int = 0
    fragments: int = 0
    outside: int = 0
    peak: int = 0
    total: int = 0
    """The card's; 0 for simulated ones."""

    @property
    def held(self) -> int:
        """What is held between steps."""
        return self.parameters + self.buffers + self.gradients + self.optimizer + self.other

    def as_dict(self) -> dict[str, Any]:
        """For JSON, in bytes."""
        return asdict(self)

    def __str__(self) -> str:
        names = ("parameters", "gradients", "optimizer", "buffers", "activations", "other", "fragments", "outside")
        parts = [f"{name} {in_words(getattr(self, name))}" for name in names if getattr(self, name)]
        peak = f"peak {in_words(self.peak)}: " if self.peak else ""
        return f"{self.card}: {peak}{', '.join(parts) or 'nothing'}"


def held_by(models: Iterable[nn.Module], optimizers: Iterable[Optimizer], more: Iterable[Tensor] = ()) -> Held:
    """What modules and optimizers hold; `more` are further gradients (buckets)."""
    models = list(models)
    parameters = [parameter for model in models for parameter in model.parameters()]
    states = [value for o in optimizers for state in o.state.values() for value in state.values()]
    return Held(
        tuple(parameters),
        tuple(buffer for model in models for buffer in model.buffers()),
        (*(parameter.grad for parameter in parameters if parameter.grad is not None), *more),
        tuple(value for value in states if isinstance(value, Tensor)),
    )


def read_memory(card: str, device: torch.device, held: Held, *, others: bool = True) -> CardMemory:
    """Read one card's memory.

    Args:
        others: count live tensors that are none of the run's, on the CPU, where several cards share them.
    """
    seen: set[tuple[str, int]] = set()
    parts = {name: bytes_of(getattr(held, name), seen) for name in ("parameters", "buffers", "gradients", "optimizer")}
    own = sum(parts.values())
    if device.type != "cuda":
        other = bytes_of(live_tensors(), seen) if others else 0
        return CardMemory(card, True, **parts, other=other)
    stats: Mapping[str, Any] = torch.cuda.memory_stats(device)
    allocated, peak = stats.get("allocated_bytes.all.current", 0), stats.get("allocated_bytes.all.peak", 0)
    reserve = read_reserve(card, device)
    other = max(allocated - own, 0)
    return CardMemory(
        card,
        False,
        **parts,
        activations=max(peak - own - other, 0),
        other=other,
        fragments=reserve.fragments,
        outside=reserve.outside,
        peak=peak,
        total=reserve.total,
    )


def judge_memory(cards: Sequence[CardMemory], *, fragments: bool = True) -> list[Finding]:
    """What is to be said of the cards' memory; nothing where it is even and whole.

    Args:
        cards: what each holds.
        fragments: say too what is fragmented.
    """
    return [*_imbalance(cards), *(_fragments(cards) if fragments else ()), *_contexts(cards)]


def _imbalance(cards: Sequence[CardMemory]) -> list[Finding]:
    real = [card for card in cards if not card.simulated]
    if len(real) < 2:
        return []
    most = max(real, key=lambda card: card.peak)
    least = min(real, key=lambda card: card.peak)
    if most.peak < _UNEQUAL * least.peak or most.peak - least.peak < _LEAST:
        return []
    gaps = {
        name: getattr(most, name) - getattr(least, name)
        for name in ("optimizer", "gradients", "activations", "other", "parameters", "buffers")
    }
    name = max(gaps, key=lambda each: gaps[each])
    why, fix = _WHY[name]
    return [
        Finding(
            f"{most.card} holds more than the other cards: {why}",
            f"peak {in_words(most.peak)} there and {in_words(least.peak)} on {least.card}; {name} "
            f"{in_words(gaps[name])} more",
            fix,
            "warning",
        )
    ]


_STEP = "train with parallel.train_step(loss_fn, model, optimizer), whose losses and updates run on each card"
_WHY = {
    "optimizer": ("the optimizer's state is on that card alone", _STEP),
    "gradients": ("gradients are added up there", _STEP),
    "activations": ("outputs are joined there, and the loss outside of the model is computed there", _STEP),
    "other": (
        "tensors that belong to no model lie there",
        "load checkpoints with torch.load(..., map_location='cpu'), and keep results with .cpu()",
    ),
    "parameters": ("a module was put on that card alone", "set it up with parallel.setup(model) as well"),
    "buffers": ("buffers were put on that card alone", "register them in the module that is set up"),
}


def _fragments(cards: Sequence[CardMemory]) -> list[Finding]:
    reserves = [
        Reserve(card.card, card.peak + card.fragments, card.peak, card.total, card.outside)
        for card in cards
        if not card.simulated
    ]
    return judge_fragments(reserves, why_not="manycard profile SCRIPT tries them")


def _contexts(cards: Sequence[CardMemory]) -> list[Finding]:
    real = [card for card in cards if not card.simulated]
    if len(real) < 2:
        return []
    most, usual = max(real, key=lambda card: card.outside), min(card.outside for card in real)
    extra = most.outside - usual
    if extra < _CONTEXT / 2:
        return []
    return [
        Finding(
            f"others use {most.card}: contexts of other ranks, or other processes",
            f"{in_words(extra)} more than on the card with the least",
            "call torch.cuda.set_device(local_rank) before anything else in each rank (manycard run does), load "
            "checkpoints with map_location='cpu', and see nvidia-smi for other processes",
            "warning",
        )
    ]
