"""The plan's choice beside every row of an exhaustive matrix, and predictions beside what was measured.

    python benchmarks/plan.py --out benchmarks/results/plan-h200x2.json
    python benchmarks/plan.py --workloads mlp,gpt2 --cards 0,1 --compile

For each workload: facts are measured, a plan is made with its few trials, and then every candidate that can run here
is measured in rounds, each time in a process of its own. The file holds, for each workload, the plan, the trials' time,
the matrix, how far the choice is from the best row, and how far each prediction is from its measurement.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import manycard as mc
from manycard.benchmark.trial import TrialSpec, run_trial
from manycard.benchmark.workloads import find_workload
from manycard.cards import choose_cards
from manycard.launch import cards_setting
from manycard.planner import Candidate, Facts, Measured, Plan, make_plan
from manycard.strategies import STRATEGIES
from manycard.trials.deciding import decide

WORKLOADS = ("resnet50", "gpt2", "resnet18-cifar", "mlp", "gpt2-xl")


def plan_of(spec: TrialSpec) -> tuple[Plan, dict[str, Any]]:
    """The plan, and how long its parts took."""
    start = time.perf_counter()
    found = run_trial(spec)
    if found["error"]:
        raise SystemExit(f"{spec.workload}: {found['error']}")
    facts, took, tried = Facts.from_document(found["facts"]), time.perf_counter() - start, []

    def run(candidate: Candidate) -> Measured:
        tried.append(candidate.name)
        return trial(spec, candidate)

    start = time.perf_counter()
    plan = decide(facts, run)
    return plan, {"facts_s": took, "trials_s": time.perf_counter() - start, "trials": tried}


def trial(spec: TrialSpec, candidate: Candidate) -> Measured:
    """One measurement of a candidate."""
    found = run_trial(replace(spec, candidate=asdict(candidate)))
    return Measured(found.get("step_ms"), found.get("memory_mib"), found["error"])


def matrix_of(spec: TrialSpec, facts: Facts, rounds: int) -> list[dict[str, Any]]:
    """Every candidate that can run here: medians over interleaved rounds, beside what the facts alone predict."""
    rows = [row for row in make_plan(facts).predictions if row.candidate.strategy in STRATEGIES]
    found: dict[Candidate, list[Measured]] = {row.candidate: [] for row in rows}
    for number in range(rounds):
        for candidate, results in found.items():
            if any(result.error for result in results):
                continue
            results.append(trial(spec, candidate))
            print(f"  round {number + 1}, {candidate.name} on {candidate.cards}: {results[-1]}", flush=True)
    return [row_of(row, found[row.candidate], facts) for row in rows]


def row_of(row: Any, results: list[Measured], facts: Facts) -> dict[str, Any]:
    """One candidate's row."""
    times = [result.step_ms for result in results if result.step_ms is not None]
    peaks = [result.memory_mib for result in results if result.memory_mib is not None]
    step = statistics.median(times) if times else None
    memory = statistics.median(peaks) if peaks else None
    return {
        "name": row.candidate.name,
        "cards": row.candidate.cards,
        "step_ms": step,
        "step_ms_all": times,
        "samples_per_s": 1e3 * facts.batch / step if step else None,
        "memory_mib": memory,
        "predicted_ms": row.predicted_ms,
        "predicted_mib": row.predicted_mib,
        "time_off": row.predicted_ms / step - 1 if step and row.predicted_ms else None,
        "memory_off": row.predicted_mib / memory - 1 if memory and row.predicted_mib else None,
        "error": next((result.error for result in results if result.error), ""),
    }


def compare(spec: TrialSpec, rounds: int) -> dict[str, Any]:
    """One workload."""
    plan, took = plan_of(spec)
    print(f"{spec.workload}: {plan.line}", flush=True)
    rows = matrix_of(spec, plan.facts, rounds)
    measured = {(row["name"], row["cards"]): row["step_ms"] for row in rows if row["step_ms"]}
    best = min(measured, key=lambda key: measured[key]) if measured else None
    own = measured.get((plan.choice.name, plan.choice.cards))
    return {
        **took,
        "choice": [plan.choice.name, plan.choice.cards],
        "best": list(best) if best else None,
        "choice_over_best": own / measured[best] if own and best else None,
        "median_time_off": middle(rows, "time_off"),
        "largest_time_off": largest(rows, "time_off"),
        "largest_memory_off": largest(rows, "memory_off"),
        "matrix": rows,
        "plan": plan.to_document(),
    }


def middle(rows: list[dict[str, Any]], key: str) -> float | None:
    """The median of absolute values."""
    known = [abs(row[key]) for row in rows if row[key] is not None]
    return statistics.median(known) if known else None


def largest(rows: list[dict[str, Any]], key: str) -> float | None:
    """The largest absolute value."""
    return max((abs(row[key]) for row in rows if row[key] is not None), default=None)


def main() -> None:
    """Compare each workload, and write JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--cards", default="all")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="consider compiled steps too")
    parser.add_argument("--small", action="store_true", help="small variants, to try this program on a CPU")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cards = choose_cards(options.cards).cards
    document: dict[str, Any] = {
        "command": re.sub(r" --out \S+", "", " ".join(["python", *sys.argv])),
        "cards": [card.model for card in cards],
        "precision": options.precision,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "manycard": mc.__version__,
        "workloads": {},
    }
    for name in options.workloads.split(","):
        batch = find_workload(name)(small=options.small).default_batch * len(cards)
        spec = TrialSpec(name, cards_setting(cards), batch, options.precision, options.small, options.compile)
        document["workloads"][name] = found = compare(spec, options.rounds)
        print(f"{name}: choice {found['choice']}, best {found['best']}, ratio {found['choice_over_best']}", flush=True)
        if options.out:
            options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
