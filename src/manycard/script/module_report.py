"""What became of the calls of one of a script's modules."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["ModuleReport"]


@dataclass
class ModuleReport:
    """What became of one module's calls."""

    name: str
    """Its class."""
    spread: int = 0
    """Calls that were spread."""
    whole: int = 0
    """Calls that ran on one card."""
    samples: int = 0
    """Samples of the calls that were spread."""
    seconds: float = 0.0
    """From the first spread call to the last, without comparisons."""
    comparisons: int = 0
    """How often a call was compared with one card."""
    comparing: float = 0.0
    """Seconds that took."""
    reasons: list[str] = field(default_factory=list)
    """Why calls ran on one card, each once."""
    differs: list[str] = field(default_factory=list)
    """Why its numbers can't be those of one card, each once."""
