"""What ``Parallel(check_every=N)`` costs: one comparison of all cards beside N train steps.

    python benchmarks/check_every.py --cards 0,1 --workload resnet50
    python benchmarks/check_every.py --cards cpu:2

Prints, for each model, the time of a step, that of a comparison, and their quotient at N. Steps and comparisons are
timed in turn, and medians are taken. Each comparison waits for the cards; so does the step before it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import manycard as mc
from manycard.diagnosis.lockstep.check import compare


def mlp(width: int, layers: int) -> tuple[nn.Module, Callable[[int], Tensor]]:
    """A perceptron and its batches: [samples, width]."""
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*parts), lambda samples: torch.randn(samples, width)


def resnet50() -> tuple[nn.Module, Callable[[int], Tensor]]:
    """ResNet-50 and drawn images."""
    from torchvision.models import resnet50 as make

    return make(), lambda samples: torch.randn(samples, 3, 224, 224)


WORKLOADS = {"mlp": lambda: mlp(512, 6), "mlp-wide": lambda: mlp(2048, 6), "resnet50": resnet50}


def measure(workload: str, cards: str, per_card: int, every: int, repeats: int) -> dict[str, float | str]:
    """Seconds of a step and of a comparison."""
    parallel = mc.Parallel("dp", cards=cards, seed=0)
    net, batches = WORKLOADS[workload]()
    model, optimizer = parallel.setup(net, torch.optim.AdamW(net.parameters()))
    step = parallel.train_step(lambda model, x: model(x).square().mean(), model, optimizer, check_loss=False)
    batch = batches(per_card * len(parallel.cards)).to(parallel.device)

    def wait() -> None:
        for card in parallel.cards:
            if not card.simulated:
                torch.cuda.synchronize(card.device)

    for _ in range(12):
        step(batch)
    compare(model, updated=True)
    steps, comparisons = [], []
    for _ in range(repeats):
        wait()
        begin = time.perf_counter()
        for _ in range(5):
            step(batch)
        wait()
        middle = time.perf_counter()
        compare(model, updated=True, buffers=False)
        steps.append((middle - begin) / 5)
        comparisons.append(time.perf_counter() - middle)
    parallel.close()
    one, check = statistics.median(steps), statistics.median(comparisons)
    return {
        "workload": workload,
        "cards": cards,
        "per_card_batch": per_card,
        "step_ms": round(1e3 * one, 3),
        "comparison_ms": round(1e3 * check, 3),
        "every": every,
        "cost_percent": round(100 * check / (every * one), 3),
    }


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", default="all")
    parser.add_argument("--workload", choices=WORKLOADS, action="append")
    parser.add_argument("--per-card-batch", type=int, default=128)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    for workload in given.workload or ["mlp", "mlp-wide"]:
        print(json.dumps(measure(workload, given.cards, given.per_card_batch, given.every, given.repeats)), flush=True)


if __name__ == "__main__":
    main()
