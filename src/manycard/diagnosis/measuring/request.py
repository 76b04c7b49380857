"""What the measuring process is asked to do; it travels as JSON on its command line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from manycard.diagnosis.measuring.bits import SIZES

__all__ = ["STAGES", "Request"]

STAGES = ("copies", "host", "load", "nccl", "ranks")
"""Everything that can be measured, in its order."""


@dataclass(frozen=True)
class Request:
    """What is to be measured on which cards."""

    devices: tuple[str, ...]
    """Torch's names, such as ``cuda:1``; ``cpu`` for a simulated card."""
    nvml: tuple[int, ...] = ()
    """NVML's numbers of the same cards; may be empty."""
    stages: tuple[str, ...] = STAGES
    copy_size: int = 256 << 20
    """Bytes of the copies that are timed."""
    compared: tuple[int, ...] = SIZES
    """Bytes of the copies that are compared."""
    reduced: tuple[int, ...] = (4 << 10, 64 << 10, 1 << 20, 25 << 20, 100 << 20, 500 << 20)
    """Bytes of the all-reduces."""
    matrix_side: int = 8192
    load_seconds: float = 1.5

    def to_json(self) -> str:
        """As `from_json` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        """Read what `to_json` wrote."""
        read: dict[str, Any] = json.loads(text)
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in read.items()
        }
        return cls(**values)
