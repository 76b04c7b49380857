"""Facts as they were recorded on two H200 (NVLink, torch 2.11), and variations of them.

One card's figures: ResNet-50 eager from ``benchmarks/results/unmodified-resnet50-h200x2.json`` (`python_one`), compiled
steps and the links' times from the table of the design. One card's peak is that of `ddp` less its buckets of gradients.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from manycard.planner import CardFacts, Facts, LinkFacts, ModelFacts, StepFacts, StepPoint

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
H200 = CardFacts("NVIDIA H200", 143_000.0)
NVLINK = LinkFacts("NVLink", True, 392.0, ((1, 0.047), (25, 0.119), (100, 0.396), (500, 1.700)), 2)
HOST = LinkFacts("PCIe", False, 9.0, ((1, 0.4), (100, 14.0), (500, 68.0)), 2)
GRADIENTS_RESNET50 = 25_557_032 * 4 / 2**20
GRADIENTS_GPT2 = 124_439_808 * 4 / 2**20


def recorded(name: str) -> dict[str, Any]:
    """The rows of a file of results."""
    rows: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return rows


def resnet50(**changed: Any) -> Facts:
    """ResNet-50, 256 images a card."""
    one = 256 / recorded("unmodified-resnet50-h200x2")["python_one"]["samples_per_s"] * 1e3
    peak = max(recorded("engine-resnet50-h200x2")["ddp"]["peak_mib"]) - GRADIENTS_RESNET50
    model = ModelFacts(
        "resnet50", GRADIENTS_RESNET50, GRADIENTS_RESNET50, GRADIENTS_RESNET50, input_mib=0.574, output_mib=0.0019
    )
    step = StepFacts(
        eager=(StepPoint(256, one, peak),),
        graphed=(StepPoint(256, one),),
        compiled=(StepPoint(256, 256 / 6783 * 1e3),),
        host_ms=40.0,
        launches=2_000,
    )
    return replace(Facts((H200, H200), model, 512, step, NVLINK, cores=32), **changed)


def gpt2(**changed: Any) -> Facts:
    """GPT-2 124M, 16 sequences of 1,024 tokens a card: compiled steps of one card, and memory."""
    peak = max(recorded("foundation-gpt2-h200x2")["ddp"]["peak_mib"]) - GRADIENTS_GPT2
    model = ModelFacts(
        "gpt2",
        GRADIENTS_GPT2,
        GRADIENTS_GPT2,
        2 * GRADIENTS_GPT2,
        input_mib=2 * 1024 * 8 / 2**20,
        output_mib=1024 * 50257 * 2 / 2**20,
    )
    step = StepFacts(eager=(StepPoint(16, None, peak),), compiled=(StepPoint(16, 16 / 490 * 1e3),))
    return replace(Facts((H200, H200), model, 32, step, NVLINK, cores=32), **changed)


def gpt2_loop(**changed: Any) -> Facts:
    """GPT-2 in a loop of its own. One card's eager step is that of `dp` less the all-reduce that it contains."""
    facts = gpt2(written="loop")
    own = recorded("foundation-gpt2-h200x2")["dp"]["step_ms"] - 1.62
    point = replace(facts.step.eager[0], ms=own)
    return replace(facts, step=StepFacts(eager=(point,), host_ms=25.0), **changed)


def cifar(**changed: Any) -> Facts:
    """ResNet-18 on small images, 128 a card: the host needs 12 ms a step for what a card computes in 3.3."""
    model = ModelFacts("resnet18-cifar", 42.7, 42.7, 42.7, input_mib=0.0117)
    step = StepFacts(
        eager=(StepPoint(128, 12.0, 474.0), StepPoint(256, 12.1, 820.0)),
        graphed=(StepPoint(128, 3.2), StepPoint(256, 6.2)),
        host_ms=11.9,
        launches=700,
    )
    return replace(Facts((H200, H200), model, 256, step, NVLINK, cores=32), **changed)


def tiny(**changed: Any) -> Facts:
    """A model so small that its step is all latency."""
    model = ModelFacts("tiny", 0.1, 0.1, 0.0)
    step = StepFacts(
        eager=(StepPoint(8, 0.50, 20.0), StepPoint(16, 0.51, 21.0)),
        graphed=(StepPoint(8, 0.060, 20.0), StepPoint(16, 0.062, 21.0)),
        host_ms=0.49,
    )
    return replace(Facts((H200, H200), model, 16, step, NVLINK, cores=32), **changed)


def giant(**changed: Any) -> Facts:
    """30 billion parameters in fp32 with Adam: 480 GB of state."""
    size = 30e9 * 4 / 2**20
    model = ModelFacts("giant", size, size, 2 * size, largest_part_mib=size / 60)
    step = StepFacts(eager=(StepPoint(1, 3_000.0, 4 * size + 900),), host_ms=60.0)
    return replace(Facts((H200,) * 8, model, 64, step, NVLINK, cores=64), **changed)
