"""One rank of every run: ``ranks_worker.py FOLDER STRATEGY CARDS [NAME ...]``.

Writes ``FOLDER/rank{r}.pt``. Started once per card count, so that all runs share one start-up.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import manycard as mc
from tests.strategies.runs import RUNS, run_all


def main(folder: Path, strategy: str, cards: str, names: list[str]) -> None:
    """Run `names`, or everything, and write what came out."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    shared = folder / "shared"
    shared.mkdir(exist_ok=True)
    make = partial(mc.Parallel, strategy, cards=cards)
    results = run_all(names or list(RUNS), make, shared)
    torch.save(results, folder / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
