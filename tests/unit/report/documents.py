"""Documents of results as `manycard bench --json` prints them, made up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def row(strategy: str, cards: int, speed: float | None, **changed: Any) -> dict[str, Any]:
    """One row of ResNet-50 at 256 a card."""
    losses = [2.3 * math.exp(-step / 40) for step in range(60)] if speed else []
    return {
        "workload": "resnet50",
        "unit": "images",
        "strategy": strategy,
        "cards": cards,
        "card_names": [f"cuda:{index}" for index in range(cards)],
        "simulated": False,
        "scaling": "weak",
        "batch": 256 * cards,
        "per_card_batch": 256,
        "precision": "bf16",
        "samples_per_s": speed,
        "step_ms": 256 * cards / speed * 1e3 if speed else None,
        "speedup": speed / 4700 if speed else None,
        "efficiency": speed / 4700 / cards if speed else None,
        "peak_memory_mib": [24600.0 + 100 * index for index in range(cards)] if speed else [None] * cards,
        "balance": 0.98 if speed else None,
        "losses": losses,
        "final_loss": losses[-1] if losses else None,
        "accuracy": None,
        "largest_loss_difference": None,
        "repeats": 3,
        "error": None,
        **changed,
    }


def document(rows: Sequence[dict[str, Any]], cards: int, **changed: Any) -> dict[str, Any]:
    """Results of `rows` from a machine with `cards` GPUs."""
    return {
        "rows": list(rows),
        "notes": [],
        "machine": {
            "cards": [{"name": f"cuda:{index}", "model": "NVIDIA H200"} for index in range(cards)],
            "cpu_cores": 32,
            "memory_gib": 256.0,
            "system": "Linux",
            "python": "3.12.1",
            "torch": "2.11.0",
            "cuda": "13.0",
            "manycard": "0.1.0",
            "measured_at": "2026-01-01T00:00:00+00:00",
        },
        "settings": {"lengths": {"resnet50": "20 steps", "gpt2": "20 steps"}, "repeats": 3, "seed": 0},
        "interrupted": False,
        **changed,
    }


OUT_OF_MEMORY = row("torch_dp", 8, None, error="out of memory: CUDA out of memory. Tried to allocate 12.00 GiB")
ONE_CARD = document([row("single", 1, 4700.0)], 1)
EIGHT_CARDS = document(
    [
        row("single", 1, 4700.0),
        *(row(strategy, count, 4500.0 * count) for count in (2, 4, 8) for strategy in ("dp", "ddp")),
        OUT_OF_MEMORY,
        row("single", 1, 340.0, workload="gpt2", unit="sequences"),
        row("dp", 2, 650.0, workload="gpt2", unit="sequences"),
    ],
    8,
)
SIMULATED = document(
    [
        row("single", 1, 900.0, simulated=True, scaling="strong", batch=128, accuracy=0.975, peak_memory_mib=[None]),
        row(
            *("dp", 2, 700.0),
            simulated=True,
            scaling="strong",
            batch=128,
            accuracy=0.975,
            peak_memory_mib=[None, None],
            balance=None,
            largest_loss_difference=1.6e-6,
        ),
    ],
    2,
    notes=["The cards are simulated <and share one CPU>."],
)
