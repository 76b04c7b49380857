"""The facts that the probes look at, read once.

Reading starts CUDA's driver through torch, and takes no memory on a card. What can't be read is None or empty;
only a choice of cards that can't be met raises (CardsError).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata

import torch

from manycard.cards import (
    CardChoice,
    CardHealth,
    CardInfo,
    Links,
    Machine,
    Surroundings,
    Visible,
    choose,
    links,
    own_pids,
    parse_spec,
    read_health,
    read_machine,
    read_surroundings,
    visible_now,
)
from manycard.diagnosis.measured import Measured

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
    nccl_packaged: str | None = None
    """The version of the NCCL package that was installed with torch; `nccl` is the one that was loaded."""


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
    health: Mapping[int, CardHealth] = field(default_factory=dict)
    """By NVML's number."""
    surroundings: Surroundings = field(default_factory=Surroundings)
    measured: Measured = field(default_factory=Measured)
    """What was measured on the chosen cards; empty where nothing was."""

    @property
    def chosen(self) -> list[tuple[str, CardInfo]]:
        """The GPUs that a run would use, by torch's name; none where cards are simulated."""
        places = [card.device.index for card in self.choice.cards if not card.simulated]
        return [(f"cuda:{place}", self.visible.cards[place]) for place in places]

    @property
    def chosen_health(self) -> list[tuple[str, CardHealth]]:
        """The health of the GPUs that a run would use, by torch's name, of those that NVML tells of."""
        return [(name, self.health[info.index]) for name, info in self.chosen if info.index in self.health]

    @property
    def hidden(self) -> list[CardInfo]:
        """Cards of the machine that torch doesn't see, neither whole nor in a slice."""
        seen = {info.uuid for info in self.visible.cards} | {info.slice_of for info in self.visible.cards}
        return [info for info in self.machine.cards if info.uuid not in seen]


def read_facts(spec: str | int | Sequence[int] = "all", *, cuda: bool = True) -> Facts:
    """Read the machine and choose the cards that a run with ``--cards`` would use.

    Args:
        spec: as `manycard.cards.choose_cards` takes it.
        cuda: False leaves CUDA alone, on a machine where it is known to hang: torch then sees no cards.

    Raises:
        CardsError: the cards asked for can't be had.
    """
    parsed = parse_spec(spec)
    machine = read_machine()
    visible = visible_now(machine.cards, machine.why_none) if cuda else Visible((), ("CUDA does not answer here",))
    joined = links([*machine.cards, *visible.cards])
    hidden = max(len(machine.cards) - len(visible.cards), 0)
    pids = own_pids()
    choice = choose(parsed, visible.cards, joined, own_pids=pids, said=visible.said, hidden=hidden)
    return Facts(
        machine,
        visible,
        joined,
        choice,
        read_torch(cuda=cuda),
        pids,
        dict(os.environ),
        health=read_health(),
        surroundings=read_surroundings(),
    )


def read_torch(*, cuda: bool = True) -> TorchFacts:
    """Read what torch is.

    Args:
        cuda: False asks CUDA nothing; see `read_facts`.
    """
    nccl = None
    if torch.version.cuda is not None and torch.distributed.is_available() and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    built_for = torch.version.cuda
    return TorchFacts(
        version=torch.__version__,
        cuda=None if built_for is None else (int(built_for.split(".")[0]), int(built_for.split(".")[1])),
        hip=torch.version.hip,
        available=cuda and torch.cuda.is_available(),
        nccl=nccl,
        archs=tuple(torch.cuda.get_arch_list()) if cuda else (),
        threads=torch.get_num_threads(),
        nccl_packaged=_packaged_nccl(built_for),
    )


def _packaged_nccl(cuda: str | None) -> str | None:
    if cuda is None:
        return None
    try:
        return metadata.version(f"nvidia-nccl-cu{cuda.split('.')[0]}")
    except metadata.PackageNotFoundError:  # torch was built from source, or came by conda
        return None
