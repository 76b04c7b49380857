"""One rank of every run: ``ranks_worker.py FOLDER STRATEGY CARDS [NAME ...]``.

Writes ``FOLDER/rank{r}.pt``, and meanwhile ``rank{r}.running``: the name of the run. Started once per card count, so
that all runs share one start-up. A run that hangs ends the rank with its traceback.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import manycard as mc
from tests.strategies.runs import RUNS, attempt, rank_runs

SECONDS_A_RUN = 40


def main(folder: Path, strategy: str, cards: str, names: list[str]) -> None:
    """Run `names`, or all that as many ranks run, and write what came out."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    shared = folder / "shared"
    shared.mkdir(exist_ok=True)
    make = partial(mc.Parallel, strategy, cards=cards)
    keeper = make()  # one process group for all runs
    mine = folder / f"rank{os.environ['RANK']}"
    results = {}
    for name in names or rank_runs(int(os.environ["WORLD_SIZE"])):
        mine.with_suffix(".running").write_text(name)
        faulthandler.dump_traceback_later(SECONDS_A_RUN, exit=True)
        results[name] = attempt(RUNS[name], make, shared)
    faulthandler.cancel_dump_traceback_later()
    torch.save(results, mine.with_suffix(".pt"))
    keeper.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
