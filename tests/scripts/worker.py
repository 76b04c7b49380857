"""Runs scripts as ``python SCRIPT`` or as ``manycard run SCRIPT`` does, each in a fork of this process.

Importing PyTorch is paid once.

Behaviour:
    * Standard input carries one JSON line a script: its ``path``, ``cards`` as ``--cards`` writes them (empty for plain
      python), ``visible`` (CUDA_VISIBLE_DEVICES; null to leave it), ``sync_batchnorm`` and ``outputs`` (as
      ``--outputs`` takes it). For each, one JSON line goes to standard output: ``status`` (what ``python`` would exit
      with), ``stdout`` and ``stderr`` of the script, ``seconds``, and ``reports`` (what was spread).
    * A fork starts from a process that has imported and computed nothing else, so no state reaches the next script.
      This process never looks at a GPU: a fork of one that did could use none.
    * A script that hangs ends with its traceback.
    * The worker ends when its standard input does.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import io
import json
import os
import runpy
import sys
import tempfile
import time
import traceback
import warnings
from typing import Any

SECONDS = 100
"""How long a script may take."""
ONLY_LOOK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With this variable, asking PyTorch whether there is a GPU starts nothing in the process that asks."""


def _import_what_scripts_do() -> None:
    import numpy  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch
    import torch._dynamo  # what the first optimizer imports

    import manycard.script  # noqa: F401

    torch.set_num_threads(1)
    assert not torch.cuda.is_initialized(), "an import has started CUDA, which no fork can use then"


def _run_spread(path: str, cards: str, sync_batchnorm: bool, outputs: str, reports: int) -> None:
    from manycard.cards import choose_cards
    from manycard.script import Interception, ScriptSpreading, SpreadSettings

    chosen = choose_cards(cards).cards
    settings = SpreadSettings(choose=lambda: chosen, sync_batchnorm=sync_batchnorm, outputs=outputs)
    spreading = ScriptSpreading(settings)
    try:
        with Interception(spreading):
            runpy.run_path(path, run_name="__main__")
    finally:
        os.write(reports, json.dumps([dataclasses.asdict(report) for report in spreading.reports]).encode())


def _in_fork(job: dict[str, Any], out: int, err: int, reports: int) -> int:
    """Become the script; gives its exit status."""
    path = job["path"]
    if job["visible"] is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = job["visible"]  # before anything looks at a GPU
    os.dup2(out, 1)
    os.dup2(err, 2)
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), line_buffering=True)  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(open(2, "wb", closefd=False), line_buffering=True)  # noqa: SIM115
    sys.argv = [path]
    sys.path[0] = os.path.dirname(path)
    status: Any = 0
    try:
        if job["cards"]:
            _run_spread(path, job["cards"], job["sync_batchnorm"], job["outputs"], reports)
        else:
            runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        status = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run one script in a fork and wait for it."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as reports:
        start = time.perf_counter()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = _in_fork(job, out.fileno(), err.fileno(), reports.fileno())
            finally:
                os._exit(status)
        _, raw = os.waitpid(child, 0)
        seconds = time.perf_counter() - start
        for file in (out, err, reports):
            file.seek(0)
        return {
            "status": os.waitstatus_to_exitcode(raw),
            "stdout": out.read().decode(),
            "stderr": err.read().decode(),
            "seconds": seconds,
            "reports": json.loads(reports.read() or "[]"),
        }


def main() -> None:
    """Answer jobs until there are no more."""
    os.environ[ONLY_LOOK] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _import_what_scripts_do()
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
