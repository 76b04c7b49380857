"""What a table of results has to say about the machine it came from."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import psutil
import torch

from manycard.cards import Card
from manycard.version import __version__

__all__ = ["describe_machine"]


def describe_machine(cards: Sequence[Card]) -> dict[str, Any]:
    """Cards, host and versions; touches no card."""
    return {
        "cards": [{"name": card.name, "model": card.model} for card in cards],
        "cpu_cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "manycard": __version__,
        "measured_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
