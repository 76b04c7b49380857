"""The same training written in several ways, side by side: lines changed, speed, memory.

    python benchmarks/patterns.py --out benchmarks/results/patterns.json
    TASK=resnet50 python benchmarks/patterns.py --out benchmarks/results/patterns-resnet50.json

The scripts are those of examples/patterns, unmodified. Each runs in processes of its own, in turn, round after round.
`one_card` sees the first GPU alone; the others see all of them, or play two cards on the CPU.

    lines_added, lines_removed   beside one_card.py, without empty lines, comments and docstrings
    images_per_s                 the median of rounds of the median of epochs, the first left out; evaluation included
    peak_mib                     a list, one a card: the most that torch's allocator held; null on the CPU
    host_mib                     the most resident memory of all its processes together, loaders included
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import platform
import re
import runpy
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

import manycard as mc

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "patterns"
PATTERNS = ("one_card", "data_parallel", "ddp", "by_hand", "drop_in", "with_manycard", "with_manycard_ddp")
LINE = re.compile(r"epoch \d+: loss ([\d.]+|nan), test accuracy ([\d.]+)%, ([\d,]+) images/s")


def run_inside(script: str, folder: Path) -> None:
    """Run a script in this process and write how much memory each card of it held."""
    sys.path.insert(0, str(FOLDER))
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")
    if torch.cuda.is_available():
        peaks = {card: torch.cuda.max_memory_allocated(card) / 2**20 for card in range(torch.cuda.device_count())}
        (folder / f"peaks-{os.getpid()}.json").write_text(json.dumps(peaks))
    sys.stdout.flush()
    os._exit(0)  # with gloo, PyTorch now and then aborts when a rank's interpreter is taken down


def code_lines(path: Path) -> list[str]:
    """The lines of a script that are code."""
    tree = ast.parse(path.read_text())
    tree.body = tree.body[1:]  # the docstring
    return ast.unparse(tree).splitlines()


def changed_lines(pattern: str) -> tuple[int, int]:
    """How many lines a pattern adds to the script for one card, and how many of it are gone."""
    base, own = (code_lines(FOLDER / f"{name}.py") for name in ("one_card", pattern.removesuffix("_ddp") or pattern))
    marks = [line[0] for line in difflib.ndiff(base, own)]
    return marks.count("+"), marks.count("-")


def command(pattern: str, folder: Path, cards: int) -> list[str]:
    """How a pattern is started."""
    inside = [str(Path(__file__).resolve()), "--inside", str(folder), "--script"]
    if pattern == "ddp":
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cards)]
        return [sys.executable, *ranks, *inside, str(FOLDER / "ddp.py")]
    if pattern == "with_manycard_ddp":
        chosen = "all" if torch.cuda.is_available() else f"cpu:{cards}"
        run = ["-m", "manycard.cli", "run", "--strategy", "ddp", "--cards", chosen]
        return [sys.executable, *run, *inside, str(FOLDER / "with_manycard.py")]
    return [sys.executable, *inside, str(FOLDER / f"{pattern}.py")]


def measure(pattern: str, cards: int, patience: float) -> dict[str, Any]:
    """One run of one pattern."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(FOLDER)])}
    if pattern == "one_card":
        environment["CUDA_VISIBLE_DEVICES"] = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        output = folder / "output"
        with output.open("wb") as log:
            process = psutil.Popen(command(pattern, folder, cards), stdout=log, stderr=log, env=environment)
            host = watch(process, patience)
        text = output.read_text(errors="replace")
        found = [(float(a), float(b), float(c.replace(",", ""))) for a, b, c in LINE.findall(text)]
        if process.returncode != 0 or len(found) < 2:
            return {"error": text[-1500:] or f"no result within {patience} s"}
        peaks: dict[str, float] = {}
        for file in folder.glob("peaks-*.json"):
            for card, peak in json.loads(file.read_text()).items():
                peaks[card] = max(peaks.get(card, 0.0), peak)
    return {
        "images_per_s": statistics.median(speed for _, _, speed in found[1:]),
        "accuracy": found[-1][1] / 100,
        "losses": [loss for loss, _, _ in found],
        "peak_mib": [peaks[card] for card in sorted(peaks, key=int)] or None,
        "host_mib": host,
    }


def watch(process: psutil.Popen, patience: float) -> float:
    """Wait for a process; the most memory that it and its children held together, in MiB."""
    most, end = 0.0, time.monotonic() + patience
    while process.poll() is None:
        held = 0
        try:
            for each in [process, *process.children(recursive=True)]:
                held += each.memory_info().rss
        except psutil.NoSuchProcess:
            pass
        most = max(most, held / 2**20)
        if time.monotonic() > end:
            for each in [*process.children(recursive=True), process]:
                each.kill()
        time.sleep(0.1)
    return most


def row(pattern: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """One pattern over all rounds."""
    added, removed = changed_lines(pattern)
    good = [found for found in rounds if "error" not in found]
    lines = {"lines_added": added, "lines_removed": removed}
    if not good:
        return {**lines, "error": rounds[-1]["error"]}
    return {
        **lines,
        "images_per_s": statistics.median(found["images_per_s"] for found in good),
        "images_per_s_all": [found["images_per_s"] for found in good],
        "accuracy": good[0]["accuracy"],
        "losses": good[0]["losses"],
        "peak_mib": good[-1]["peak_mib"],
        "host_mib": statistics.median(found["host_mib"] for found in good),
    }


def main() -> None:
    """Run all patterns in rounds, print each, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patterns", default=",".join(PATTERNS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=float, default=180, help="seconds that one run may take")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--script", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        run_inside(options.script, options.inside)
        return
    gpus = torch.cuda.device_count()
    cards = gpus or 2
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in options.patterns.split(",")}
    for number in range(options.rounds):
        for pattern, found in rounds.items():
            found.append(measure(pattern, cards, options.patience))
            shown = found[-1].get("images_per_s") or found[-1]["error"]
            print(number + 1, pattern, shown, flush=True)
        document = {
            "kind": "patterns",
            "command": re.sub(r" --out \S+", "", " ".join(["python", *sys.argv])),
            "task": os.environ.get("TASK", "digits"),
            "gpu": torch.cuda.get_device_name(0) if gpus else "simulated",
            "cards": cards,
            "cores": len(os.sched_getaffinity(0)),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "manycard": mc.__version__,
            "rows": {pattern: row(pattern, found) for pattern, found in rounds.items()},
        }
        if options.out:
            options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
