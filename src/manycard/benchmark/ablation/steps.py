"""The settings that an ablation looks at: each a small change of a recipe, and why it may not apply.

The order is that in which they are put together. A step *stands on* the way without which it means nothing: alone it
is compared with that way as it is.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from manycard.benchmark.workloads import Workload

__all__ = ["STEPS", "Situation", "Step"]


@dataclass(frozen=True)
class Situation:
    """What decides whether steps apply."""

    simulated: bool
    cards: int
    """Cards that are chosen."""
    visible: int
    """Cards that `nn.DataParallel` takes by itself."""
    workload: type[Workload]
    files: bool
    """Whether images come from files."""


def _always(here: Situation) -> str | None:
    return None


def _replicas(here: Situation) -> str | None:
    if here.simulated:
        return "without GPUs nn.DataParallel runs the module itself: it has no replicas"
    return None if here.visible > 1 else "one card only"


def _choice(here: Situation) -> str | None:
    if here.simulated:
        return "simulated cards are all alike"
    return "the chosen cards are all that are visible" if here.cards == here.visible else None


def _copies(here: Situation) -> str | None:
    return "batches are copied to no GPU" if here.simulated else None


def _loading(here: Situation) -> str | None:
    return None if here.files else "batches are ready in memory (give --files FOLDER for images from files)"


def _images(here: Situation) -> str | None:
    return None if here.workload.has_images else f"{here.workload.name} has no images"


def _several(here: Situation) -> str | None:
    return None if here.cards > 1 else "one card only"


def _nccl(here: Situation) -> str | None:
    return "simulated cards don't use NCCL" if here.simulated else _several(here)


def _compiler(here: Situation) -> str | None:
    if here.simulated and not any(map(shutil.which, ("g++", "clang++"))):
        return "there is no C++ compiler here, which torch.compile needs on the CPU"
    return None


def _graphs(here: Situation) -> str | None:
    return "simulated cards have no CUDA graphs" if here.simulated else None


@dataclass(frozen=True)
class Step:
    """One setting."""

    name: str
    title: str
    changes: Mapping[str, Any]
    stands_on: str = "torch_dp"
    why_not: Callable[[Situation], str | None] = _always
    together: bool = True
    """Whether it is among those that are put together; its opposite is there where it isn't."""


STEPS = (
    Step("cards", "chosen cards", {"chosen_cards": True}, why_not=_choice),
    Step("loss", "loss in the replicas", {"loss_inside": True}, why_not=_replicas),
    Step("output", "outputs on the last card", {"output_last": True}, why_not=_replicas, together=False),
    Step("pinned", "pinned memory", {"pinned": True}, why_not=_copies),
    Step("workers", "loader workers", {"workers": True}, why_not=_loading),
    Step("backend", "manycard's image backend", {"backend": True}, why_not=_loading),
    Step("precision", "mixed precision (bf16)", {"precision": "bf16"}),
    Step("channels-last", "channels-last", {"channels_last": True}, why_not=_images),
    Step("fused", "fused optimizer", {"fused": True}),
    Step("ddp", "one process a card (DDP)", {"way": "ddp"}, why_not=_several),
    Step("bucket-view", "gradient_as_bucket_view", {"bucket_view": True}, "ddp", _several),
    Step("static-graph", "static graph", {"static_graph": True}, "ddp", _several),
    Step("bucket-size", "buckets of 100 MiB", {"bucket_cap_mb": 100}, "ddp", _several),
    Step("nccl", "NCCL_ALGO=Ring", {"environment": (("NCCL_ALGO", "Ring"),)}, "ddp", _nccl),
    Step("engine", "manycard's engine", {"way": "dp"}),
    Step("compile", "compile", {"compile": True}, "dp", _compiler),
    Step("graphs", "CUDA graphs", {"graphs": True}, "dp", _graphs),
)
