"""One rank of many scripts, one after another: ``ranks_worker.py FOLDER``.

Started once for all scripts, so that importing PyTorch is paid once. FOLDER/jobs.json lists them: ``name``, ``path``
and ``sync_batchnorm``. Each runs in a fork of this process, as `manycard run --strategy ddp` would run it in this rank:

    FOLDER/NAME/RANK.out, RANK.err, RANK.status    what it printed, and how it ended
    FOLDER/NAME/spread.json                        what was spread
    FOLDER/NAME/work                               the working folder

A fork starts from a process that has imported and computed nothing else. One that hangs ends with its traceback.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import sklearn.datasets
import torch
import torch._dynamo
import torch.distributed as dist

from manycard.launch import Script, exit_status
from manycard.script.ranks.main import RankSettings, run_in_rank

SECONDS = 100

_ = sklearn.datasets, torch._dynamo  # what scripts import, imported once


def _join(name: str) -> None:
    """Make a process group of this script's own, over the launcher's store."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=world)


def _become(job: dict[str, Any], folder: Path, rank: str, world: int) -> int:
    for number, ending in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{ending}", os.O_CREAT | os.O_WRONLY, 0o600), number)
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    os.chdir(folder / "work")
    torch.set_num_threads(1)
    settings = RankSettings(
        tuple(f"cpu:{position}" for position in range(world)),
        seed=1,
        sync_batchnorm=job["sync_batchnorm"],
        report=str(folder / "spread.json"),
    )
    try:
        _join(job["name"])
        run_in_rank(settings, Script(job["path"]), folder / rank)
    except SystemExit as request:
        return exit_status(request)[0]
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def main(root: Path) -> None:
    """Run all jobs."""
    rank, world = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    for job in json.loads((root / "jobs.json").read_text()):
        folder = root / job["name"]
        for name in ("work", "0", rank):
            (folder / name).mkdir(parents=True, exist_ok=True)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = _become(job, folder, rank, world)
            finally:
                os._exit(status)
        _, raw = os.waitpid(child, 0)
        (folder / f"{rank}.status").write_text(str(os.waitstatus_to_exitcode(raw)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
