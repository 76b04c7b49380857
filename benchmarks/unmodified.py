"""An unmodified script under ``manycard run`` beside the same script under ``python``.

    python benchmarks/unmodified.py --out benchmarks/results/unmodified-resnet50.json
    python benchmarks/unmodified.py --model mlp --cards cpu:2 --per-card-batch 64      # to try it without GPUs

Ways, each in a process of its own, in turn, round after round; figures are medians over rounds:

    python_one       python train.py, one card's batch
    run_one          manycard run --cards 0, train.py, the same batch: what being watched costs
    run_all          manycard run train.py, that batch times the cards: how it scales
    data_parallel    python train.py --data-parallel, the global batch: nn.DataParallel as people write it
    run_replaced     manycard run train.py --data-parallel, the global batch: nn.DataParallel replaced

A way's time starts after a warm-up of 34 steps, in which calls 1, 2, 4, 8, 16 and 32 are compared with one card;
what comparisons cost is said in the run's last line, which is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from manycard.cards import choose_cards
from manycard.launch import cards_setting

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "scripts" / "train.py"


def ways(options: argparse.Namespace, cards: Any) -> dict[str, list[str]]:
    """The command of each way."""
    python = [sys.executable, str(SCRIPT)]
    run = [sys.executable, "-m", "manycard.cli", "run", "--cards"]
    one = "0," if not cards[0].simulated else "cpu:1"
    small = ["--model", options.model, "--batch", str(options.per_card_batch)]
    whole = ["--model", options.model, "--batch", str(options.per_card_batch * len(cards))]
    return {
        "python_one": [*python, *small],
        "run_one": [*run, one, str(SCRIPT), *small],
        "run_all": [*run, cards_setting(cards), str(SCRIPT), *whole],
        "data_parallel": [*python, *whole, "--data-parallel"],
        "run_replaced": [*run, cards_setting(cards), str(SCRIPT), *whole, "--data-parallel"],
    }


def measure(command: list[str], one_card: bool) -> dict[str, Any]:
    """Run a way once; gives what its script printed, and what manycard said."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    if one_card:
        environment["CUDA_VISIBLE_DEVICES"] = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=550)
    if done.returncode != 0:
        return {"error": done.stderr[-2000:]}
    return {**json.loads(done.stdout.splitlines()[-1]), "said": done.stderr.splitlines()}


def main() -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("resnet50", "mlp"), default="resnet50")
    parser.add_argument("--cards", default="all")
    parser.add_argument("--per-card-batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", help="a list such as python_one,run_all; all by default")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cards = choose_cards(options.cards).cards
    commands = ways(options, cards)
    chosen = options.ways.split(",") if options.ways else list(commands)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in chosen}
    for number in range(options.rounds):
        for way in chosen:
            result = measure(commands[way], one_card=way in ("python_one", "run_one"))
            found[way].append(result)
            said = result.get("said", [])[-1:]
            print(number + 1, way, result.get("samples_per_s") or result["error"], *said, flush=True)
        if options.out:
            options.out.write_text(json.dumps(document(options, cards, found), indent=1) + "\n")
    for way, results in found.items():
        values = row(results)
        print(f"{way:14} {values['samples_per_s'] or 0:12,.1f} samples/s  {values['losses']}")


def document(options: argparse.Namespace, cards: Any, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What a file of results holds."""
    return {
        "command": re.sub(r" --out \S+", "", " ".join(["python", *sys.argv])),
        "model": options.model,
        "per_card_batch": options.per_card_batch,
        "cards": len(cards),
        "gpu": "simulated" if cards[0].simulated else torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": {way: row(results) for way, results in found.items() if results},
    }


def row(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of one way's rounds."""
    good = [result for result in results if "error" not in result]
    return {
        "samples_per_s": statistics.median(result["samples_per_s"] for result in good) if good else None,
        "samples_per_s_all": [result["samples_per_s"] for result in good],
        "losses": good[0]["losses"] if good else None,
        "said": good[0]["said"] if good else None,
        "errors": [result["error"] for result in results if "error" in result],
    }


if __name__ == "__main__":
    main()
