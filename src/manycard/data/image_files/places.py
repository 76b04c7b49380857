"""Which devices this process decodes on.

Behaviour:
    * One process for all cards: all cards that were given, the primary first.
    * One process a card: of the run's cards, this rank's own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["own_devices"]


def own_devices(cards: Sequence[Any] | None) -> list[torch.device]:
    """The devices of `cards` that are this process's.

    Args:
        cards: torch's indices of GPUs, or `manycard.Card` objects as `Parallel.cards` holds them; None for none.
    """
    devices = [torch.device("cuda", card) if isinstance(card, int) else card.device for card in cards or ()]
    if len(devices) > 1 and os.environ.get("LOCAL_WORLD_SIZE") == str(len(devices)):
        return [devices[int(os.environ["LOCAL_RANK"])]]
    return devices
