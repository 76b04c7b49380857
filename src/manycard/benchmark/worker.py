"""One row of a benchmark, in a process of its own: ``python -m manycard.benchmark.worker FOLDER``.

Behaviour:
    * FOLDER holds ``row.json``, a `RowSpec`. The process leaves ``result.json`` there, a row of results, and
      writes ``progress``, lines of ``done total``, on the way.
    * A strategy with one process a card starts its ranks, which run this same module; rank 0 writes the files.
    * Whatever goes wrong is a row with ``error``, and exit status 0: the row was run, and this is what it showed.
    * After the timed steps the replicas are compared bit by bit. A row whose replicas differ is an error row.
    * A row that is slower than was expected of it then records some steps more (`profiled`).
    * Shortly before its time is over, it writes where its threads stand.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from manycard.benchmark.failures import describe_failure
from manycard.benchmark.measurement import Measurement
from manycard.benchmark.pipeline_run import PIPELINE, PipelineRun
from manycard.benchmark.profiled import Expected
from manycard.benchmark.results import write_json
from manycard.benchmark.row import RowSpec
from manycard.benchmark.scripts import measure_script
from manycard.benchmark.training import make_parallel, measure
from manycard.cards import choose_cards
from manycard.errors import RankFailed
from manycard.launch import launch_script
from manycard.strategies import STRATEGIES

__all__ = ["main", "run_worker"]


class _Row(Protocol):
    @property
    def cards(self) -> str: ...

    @property
    def strategy(self) -> str: ...

    @property
    def worker(self) -> str: ...

    def measurement(self, **found: Any) -> Measurement: ...


def run_worker(folder: Path, spec: _Row, run: Callable[[float], Measurement | None]) -> int:
    """Run a row to its result; the exit status.

    Args:
        folder: where the row's files are.
        spec: the row.
        run: given when the row began, trains and measures; None in a process whose rank 0 has the result.
    """
    began = json.loads((folder / "request.json").read_text(encoding="utf-8"))["began"]
    try:
        ranks = spec.strategy in STRATEGIES and STRATEGIES[spec.strategy].ranks  # a pipeline is none of them
        if ranks and "RANK" not in os.environ:
            launch_script(["-m", spec.worker, str(folder)], choose_cards(spec.cards).cards)
            return 0
        with _showing_where_it_stands(folder):
            found = run(began)
    except Exception as error:
        if "RANK" in os.environ:
            raise  # the process that started the ranks says it, once
        if (folder / "result.json").exists():
            return 0  # what was measured holds, however the script ended afterwards
        trace = error.trace if isinstance(error, RankFailed) else traceback.format_exc()
        found = spec.measurement(error=describe_failure(error), trace=trace)
    if found is not None:
        write_json(folder / "result.json", found.to_row())
    return 0


@contextmanager
def _showing_where_it_stands(folder: Path) -> Iterator[None]:
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    with (folder / f"stacks-{os.environ.get('RANK', 0)}").open("w") as file:
        faulthandler.dump_traceback_later(max(request["stacks_at"] - time.time(), 0.1), file=file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def main(arguments: list[str]) -> int:
    """Run the row in the folder named by the only argument."""
    folder = Path(arguments[0])
    spec = RowSpec.from_json((folder / "row.json").read_text(encoding="utf-8"))
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    expected = Expected.of(request.get("expected"))

    def run(began: float) -> Measurement | None:
        if spec.script:
            return measure_script(spec, folder, began, expected)
        if spec.strategy == PIPELINE:
            pipeline = PipelineRun(spec)
            try:
                return measure(spec, pipeline, began, folder / "progress", pipeline.timeline)
            finally:
                pipeline.close()
        parallel = make_parallel(spec)
        try:
            found = measure(spec, parallel, began, folder / "progress", expected=expected)
            return found if parallel.is_primary else None
        finally:
            parallel.close()

    return run_worker(folder, spec, run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
