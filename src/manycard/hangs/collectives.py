"""Which collective of torch.distributed this process has called last: PyTorch's flight recorder, where it is on.

``TORCH_FR_BUFFER_SIZE`` turns it on, and the launcher sets it for its ranks. It keeps the newest collectives with their
number, name, sizes and whether they have ended. Without it, nothing is known, and stacks alone say who waits where.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["RECORDER_ENVIRONMENT", "Collective", "newest_collective"]

RECORDER_ENVIRONMENT = {"TORCH_FR_BUFFER_SIZE": "200"}
"""What switches the recorder on."""


@dataclass(frozen=True)
class Collective:
    """A collective that a rank has called."""

    number: int
    """Its place among the collectives of its group, from 1."""
    name: str
    """``"all_reduce"``, as PyTorch calls it."""
    sizes: str
    """What it was given, such as ``3 x 1024 float numbers``."""
    ended: bool
    group: str = ""

    def __str__(self) -> str:
        return f"{self.name} number {self.number}" + (f" of {self.sizes}" if self.sizes else "")


def newest_collective() -> Collective | None:
    """The newest collective of this process; None where nothing is known."""
    module: Any = sys.modules.get("torch._C._distributed_c10d")
    if module is None or "torch.distributed" not in sys.modules:
        return None
    newest: dict[str, Any] | None = None
    for dump in ("_dump_nccl_trace", "_dump_fr_trace"):
        with contextlib.suppress(Exception):  # no part of PyTorch's stable interface
            for entry in pickle.loads(getattr(module, dump)()).get("entries", []):
                if not entry.get("is_p2p") and (newest is None or entry["time_created_ns"] > newest["time_created_ns"]):
                    newest = entry
    return None if newest is None else _read(newest)


def _read(entry: dict[str, Any]) -> Collective:
    return Collective(
        number=int(entry.get("collective_seq_id", 0)),
        name=str(entry.get("profiling_name", "")).partition(":")[2] or str(entry.get("profiling_name", "")),
        sizes=_in_words(entry.get("input_sizes") or [], entry.get("input_dtypes") or []),
        ended=entry.get("state") == "completed" or bool(entry.get("retired")),
        group=str((entry.get("process_group") or ("", ""))[1]),
    )


def _in_words(sizes: Sequence[Sequence[int]], kinds: Sequence[object]) -> str:
    """Tensors in words; empty for none."""
    if not sizes:
        return ""
    each = " and ".join(" x ".join(map(str, size)) or "1" for size in sizes)
    what = ", ".join(dict.fromkeys(str(kind).lower() for kind in kinds))
    return " ".join(word for word in (each, what, "numbers") if word)
