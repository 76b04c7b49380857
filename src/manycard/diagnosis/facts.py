"""The facts that the probes look at, read once.

Reading starts CUDA's driver through torch, and takes no memory on a card. What can't be read is None or empty;
only a choice of cards that can't be met raises (CardsError).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from manycard.cards import (
    CardChoice,
    CardInfo,
    Links,
    Machine,
    Visible,
    choose,
    links,
    own_pids,
    parse_spec,
    read_machine,
    visible_now,
)

__all__ = ["Facts", "TorchFacts", "read_facts", "read_torch"]


@dataclass(frozen=True)
class TorchFacts:
    """What torch was built with, and what it can use."""

    version: str
    cuda: tuple[int, int] | None
    """The CUDA it was built with; None for a build for the CPU only."""
    hip: str | None
    """The ROCm it was built with."""
    available: bool
    """Whether it can use at least one card."""
    nccl: str | None
    """NCCL's version; None without it."""
    archs: tuple[str, ...]
    """What it holds kernels for, such as ``sm_90``; ``compute_90`` is code that the driver translates."""
    threads: int
    """How many threads an operator on the CPU takes."""


@dataclass(frozen=True)
class Facts:
    """What this machine has and what a run would use of it."""

    machine: Machine
    visible: Visible
    links: Links
    choice: CardChoice
    torch: TorchFacts
    own_pids: frozenset[int] = frozenset()
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str = platform.python_version()

    @property
    def chosen(self) -> list[tuple[str, CardInfo]]:
        """The GPUs that a run would use, by torch's name; none where cards are simulated."""
        places = [card.device.index for card in self.choice.cards if not card.simulated]
        return [(f"cuda:{place}", self.visible.cards[place]) for place in places]

    @property
    def hidden(self) -> list[CardInfo]:
        """Cards of the machine that torch doesn't see, neither whole nor in a slice."""
        seen = {info.uuid for info in self.visible.cards} | {info.slice_of for info in self.visible.cards}
        return [info for info in self.machine.cards if info.uuid not in seen]


def read_facts(spec: str | int | Sequence[int] = "all") -> Facts:
    """Read the machine and choose the cards that a run with ``--cards`` would use.

    Args:
        spec: as `manycard.cards.choose_cards` takes it.

    Raises:
        CardsError: the cards asked for can't be had.
    """
    parsed = parse_spec(spec)
    machine = read_machine()
    visible = visible_now(machine.cards, machine.why_none)
    joined = links([*machine.cards, *visible.cards])
    hidden = max(len(machine.cards) - len(visible.cards), 0)
    pids = own_pids()
    choice = choose(parsed, visible.cards, joined, own_pids=pids, said=visible.said, hidden=hidden)
    return Facts(machine, visible, joined, choice, read_torch(), pids, dict(os.environ))


def read_torch() -> TorchFacts:
    """Read what torch is."""
    nccl = None
    if torch.version.cuda is not None and torch.distributed.is_available() and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    cuda = torch.version.cuda
    return TorchFacts(
        version=torch.__version__,
        cuda=None if cuda is None else (int(cuda.split(".")[0]), int(cuda.split(".")[1])),
        hip=torch.version.hip,
        available=torch.cuda.is_available(),
        nccl=nccl,
        archs=tuple(torch.cuda.get_arch_list()),
        threads=torch.get_num_threads(),
    )
