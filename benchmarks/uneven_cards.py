"""One card slower than the others: equal shares, shares that are known, and ``weights="auto"``.

    python benchmarks/uneven_cards.py --cards 2 3 4 --out benchmarks/results/uneven-cards-cpu.json

Simulated cards, of which the last is slowed. They run in turn on one CPU, so wall time shows nothing. What a step takes
on many cards is what it takes on the slowest: what each card's thread computes for forward, backward and update, times
the card's slowdown. All ways train the same model on the same batches, in turn, round after round; a card's time is its
median over all rounds' steps.

    equal     weights=[1, 1, ...]
    known     weights by the slowdown that was set: what a user would write who knows it
    auto      weights="auto"; timed are the steps after the shares were found, how many steps that took is a figure too

The ideal is what all cards' speeds add up to, each taken from the equal shares of the same rounds. The cost of a step
that doesn't grow with a card's share (launches, the update) counts in each card's speed as if it did, so the ideal is
a little less than what shares can reach when that cost is small beside the rest, and more when it is not.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import re
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import manycard as mc
from manycard.cards.choose import SLOWDOWN_VARIABLE
from manycard.engine.driving.card_times import MeasuredTimes, StepTime

STEPS = 30
"""Steps of a way in one round."""
SEARCH = 60
"""Steps before the first round."""
FEATURES, WIDTH = 64, 512


def make_model() -> nn.Module:
    """A network whose work grows with the batch."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    """Mean squared error."""
    return (model(batch[0]) - batch[1]).square().mean()


@dataclass
class Way:
    """One way of sharing, trained on."""

    cards: int
    weights: Any
    batch: tuple[torch.Tensor, torch.Tensor]
    times: list[StepTime] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parallel = mc.Parallel("manual", cards=f"cpu:{self.cards}", weights=self.weights)
        module = make_model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        self.model, optimizer = self.parallel.setup(module, optimizer)
        self.step = self.parallel.train_step(loss_fn, self.model, optimizer)
        self.changes = 0

    def search(self) -> int:
        """Take the first steps; after how many of them the shares stood."""
        stood = 0
        shares = self.parallel.strategy.shares
        before = shares(self.model)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            for number in range(SEARCH):
                self.step(self.batch)
                if shares(self.model) != before:
                    before, stood = shares(self.model), number + 1
        self.changes = said.getvalue().count("from now on")
        return stood

    def round(self) -> None:
        """Take some steps and keep what each card took."""
        engine = self.model.engine
        own, engine.times = engine.times, MeasuredTimes(engine.cards)
        for _ in range(STEPS):
            self.step(self.batch)
        self.times += engine.times.finished()
        engine.times = own

    @property
    def card_seconds(self) -> list[float]:
        """Median seconds of a step on each card."""
        return [statistics.median(of_card) for of_card in zip(*(step.seconds for step in self.times), strict=True)]

    def result(self, samples: int) -> dict[str, Any]:
        slowest = max(self.card_seconds)
        return {
            "sizes": list(self.times[-1].samples),
            "card_ms": [1e3 * seconds for seconds in self.card_seconds],
            "slowest_card_ms": 1e3 * slowest,
            "samples_per_s": samples / slowest,
        }


def measure(cards: int, slowdown: float, samples: int, rounds: int) -> dict[str, Any]:
    """All ways on so many cards."""
    os.environ[SLOWDOWN_VARIABLE] = ",".join(["1"] * (cards - 1) + [str(slowdown)])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, FEATURES, generator=generator)
    batch = (x, x[:, :1].sin())
    weights = {"equal": [1] * cards, "known": [slowdown] * (cards - 1) + [1], "auto": "auto"}
    ways = {name: Way(cards, chosen, batch) for name, chosen in weights.items()}
    steps = {name: way.search() for name, way in ways.items()}
    for _ in range(rounds):
        for way in ways.values():
            way.round()
    rows = {name: way.result(samples) for name, way in ways.items()}
    for way in ways.values():
        way.parallel.check_lockstep(way.model)
        way.parallel.close()
    equal = ways["equal"]
    speeds = [size / seconds for size, seconds in zip(rows["equal"]["sizes"], equal.card_seconds, strict=True)]
    auto = rows["auto"]["samples_per_s"]
    return {
        "cards": cards,
        "slowdown_of_last": slowdown,
        "batch": samples,
        "ways": rows,
        "ideal_samples_per_s": sum(speeds),
        "auto_of_ideal": auto / sum(speeds),
        "auto_over_equal": auto / rows["equal"]["samples_per_s"],
        "auto_over_known": auto / rows["known"]["samples_per_s"],
        "auto_steps_until_found": steps["auto"],
        "auto_changes": ways["auto"].changes,
    }


def main() -> None:
    """Measure, print a line a card count, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--slowdown", type=float, default=3.0)
    parser.add_argument("--per-card-batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    shown = (
        "{cards} cards, the last {slowdown_of_last:g} times as slow: auto {auto_of_ideal:.3f} of the ideal,"
        " {auto_over_equal:.2f} times equal shares, {auto_over_known:.3f} times known ones; found after"
        " {auto_steps_until_found} steps and {auto_changes} changes"
    )
    for cards in options.cards:
        row = measure(cards, options.slowdown, options.per_card_batch * cards, options.rounds)
        rows.append(row)
        print(shown.format(**row), row["ways"]["auto"]["sizes"])
    if options.out:
        document = {
            "command": re.sub(r" --out \S+", "", " ".join(["python", *sys.argv])),
            "measured": "the slowest card's median time for forward, backward and update of a step; cards run in turn",
            "torch": torch.__version__,
            "python": platform.python_version(),
            "manycard": mc.__version__,
            "rows": rows,
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
