"""Host time of one eager step: a plain loop, the engine's step and the drop-in, each on one card, interleaved.

    python benchmarks/host_cost.py [--out FILE]

On one card nothing is spread, so what the engine's step costs over the plain loop is its own bookkeeping: looking
for changes in the module, buckets, threads. Several cards pay it once.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import manycard as mc
from manycard.benchmark.workloads import Feeding, find_workload


def plain(model: nn.Module, loss_fn: Any, optimizer: Any) -> Callable[[Any], Any]:
    """The loop that PyTorch's tutorials show."""

    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def measure(workload_name: str, batch_size: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds a step of each way, one figure a round."""
    workload = find_workload(workload_name)(small=False, channels_last=True)
    feeding = Feeding(batch=batch_size, length=1, seed=0)
    batch, _ = next(iter(workload.batches(mc.Parallel(strategy="single", cards="0,"), feeding)))
    ways: dict[str, Callable[[Any], Any]] = {}
    torch.manual_seed(0)
    start = workload.make_model()
    for name in ("plain", "single", "dp"):
        model = copy.deepcopy(start).cuda()
        optimizer = workload.make_optimizer(model)
        if name == "plain":
            ways[name] = plain(model, workload.loss, optimizer)
        else:
            parallel = mc.Parallel(strategy=name, cards="0,", precision="bf16")
            model, optimizer = parallel.setup(model, optimizer)
            ways[name] = parallel.train_step(workload.loss, model, optimizer)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for step in ways.values():
        for _ in range(10):
            step(batch)
    for _ in range(rounds):
        for name, step in ways.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(steps):
                step(batch)
            torch.cuda.synchronize()
            found[name].append((time.perf_counter() - begin) / steps * 1e3)
    return found


def main() -> None:
    """Measure and print a table; write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    rows = []
    for name, batch, steps in (("mlp", 256, 100), ("resnet18-cifar", 128, 40), ("resnet50", 256, 10), ("gpt2", 16, 10)):
        found = measure(name, batch, options.rounds, steps)
        medians = {way: statistics.median(times) for way, times in found.items()}
        rows.append({"workload": name, "batch": batch, "step_ms": medians, "rounds": found})
        print(name, {way: round(value, 3) for way, value in medians.items()}, flush=True)
    if options.out:
        machine = {
            "gpu": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        document = {"command": "python benchmarks/host_cost.py", **machine, "rows": rows}
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
