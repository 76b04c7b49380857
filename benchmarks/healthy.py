"""A healthy run has no finding: ResNet-50 in ``dp`` on all cards, looked at by everything that looks for faults.

    python benchmarks/healthy.py                                 all cards; writes results/healthy-resnet50-<n>x.json
    python benchmarks/healthy.py --cards cpu:2 --small --out /tmp/healthy.json

Looked at are the machine (as ``manycard doctor`` does), where a step's time goes, what the memory of each card is for,
whether memory grows, and whether the cards are in lockstep. The machine's findings are listed apart: they are no fault
of the run. Exit status: 0 no finding about the run; 1 some, which are printed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import manycard as mc
from manycard.benchmark.machine import describe_machine
from manycard.benchmark.results import write_json
from manycard.benchmark.workloads import Feeding, find_workload
from manycard.diagnosis import diagnose, read_facts
from manycard.diagnosis.measuring import measure

WATCHED, SKIPPED, PROFILED = 40, 10, 8
"""Steps: memory is watched in the first, then some pass, then those that are profiled."""


def machine_findings(cards: str) -> list[dict[str, Any]]:
    """What the doctor says of the machine, notes left out."""
    facts = read_facts(cards)
    found = diagnose(replace(facts, measured=measure(facts)) if facts.chosen else facts)
    return [asdict(finding) for finding in found if finding.severity != "note"]


def run(cards: str, name: str, precision: str, per_card: int | None, *, small: bool) -> dict[str, Any]:
    """Train, look, and return what was seen."""
    workload = find_workload(name)(small=small)
    torch.manual_seed(0)
    net = workload.make_model()
    optimizer = workload.make_optimizer(net)
    parallel = mc.Parallel("dp", cards=cards, precision=precision, seed=0)
    model, optimizer = parallel.setup(net, optimizer)
    step = parallel.train_step(workload.loss, model, optimizer, check_loss=False)
    size = (per_card or workload.default_batch) * len(parallel.cards)
    batches = workload.batches(parallel, Feeding(size, 1, 0))
    for _ in range(SKIPPED):
        step(next(batches)[0])
    with parallel.watch_memory() as watch:
        for _ in range(WATCHED):
            step(next(batches)[0])
    with parallel.profile(steps=PROFILED, skip=SKIPPED, say=False) as profiling:
        while profiling.result is None:
            step(next(batches)[0])
    profile, memory = profiling.result, parallel.memory()
    lockstep = parallel.check_lockstep(model)
    findings = [
        *({**asdict(each.finding), "gain": each.gain} for each in profile.opportunities),
        *(asdict(finding) for finding in dict.fromkeys([*watch.findings, *profile.growth, *memory.findings])),
    ]
    document = {
        "workload": workload.name,
        "strategy": "dp",
        "cards": len(parallel.cards),
        "precision": parallel.precision.name,
        "global_batch": size,
        "steps": SKIPPED + WATCHED + SKIPPED + PROFILED + 1,
        "findings": findings,
        "lockstep": str(lockstep),
        "profile": [card.as_dict() for card in profile.cards],
        "memory": [card.as_dict() for card in memory.cards],
        "machine": describe_machine(parallel.cards),
    }
    parallel.close()
    return document


def main() -> int:
    """Run and write the document; the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--cards", default="all")
    parser.add_argument("--workload", default="resnet50")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--per-card-batch", type=int)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    document = run(asked.cards, asked.workload, asked.precision, asked.per_card_batch, small=asked.small)
    document["machine_findings"] = machine_findings(asked.cards)
    name = f"healthy-{document['workload']}-{document['cards']}x.json"
    out = asked.out or Path(__file__).parent / "results" / name
    write_json(out, document)
    for finding in document["findings"]:
        print(f"{finding['cause']} ({finding['evidence']}). Fix: {finding['fix']}.")
    for finding in document["machine_findings"]:
        print(f"of the machine: {finding['cause']} ({finding['evidence']})")
    print(f"{len(document['findings'])} findings about the run; {document['lockstep']}; written to {out}")
    return 1 if document["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
