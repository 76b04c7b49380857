"""A card: one device that computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Card"]


@dataclass(frozen=True)
class Card:
    """One device that computes: a CUDA GPU, or one simulated on the CPU.

    Simulated cards (``cpu:N``) share the CPU and run in turn. They exist to develop and test multi-card
    training on any machine; they show what is computed, never how fast it would be.
    """

    position: int
    """Place among the chosen cards; 0 is the primary, which holds the module the user made."""
    device: torch.device
    """Where tensors of this card live: ``cuda:i`` in torch's numbering, or ``cpu``."""
    model: str = "simulated"
    """The product name, such as ``NVIDIA H200``."""
    uuid: str = ""
    """The GPU's UUID as NVML gives it; empty for a simulated card."""
    slowdown: float = 1.0
    """How many times as long a simulated card takes for its work, by sleeping after it; 1 for a real one."""

    @property
    def simulated(self) -> bool:
        """Whether the CPU plays this card."""
        return self.device.type == "cpu"

    @property
    def name(self) -> str:
        """How messages call it: ``cuda:1``, or ``cpu:1`` for the second simulated card."""
        return f"cpu:{self.position}" if self.simulated else str(self.device)

    def __str__(self) -> str:
        return self.name
