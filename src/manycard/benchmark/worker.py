"""One row of a benchmark, in a process of its own: ``python -m manycard.benchmark.worker FOLDER``.

Behaviour:
    * FOLDER holds ``row.json``, a `RowSpec`. The process leaves ``result.json`` there, a row of results, and
      writes ``progress``, lines of ``done total``, on the way.
    * A strategy with one process a card starts its ranks, which run this same module; rank 0 writes the files.
    * Whatever goes wrong is a row with ``error``, and exit status 0: the row was run, and this is what it showed.
    * After the timed steps the replicas are compared bit by bit. A row whose replicas differ is an error row.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from manycard.benchmark.failures import describe_failure
from manycard.benchmark.gauges import StepClock, peak_memory_mib, reset_peak_memory
from manycard.benchmark.measurement import Measurement, balance_of, finite
from manycard.benchmark.pipeline_run import PIPELINE, PipelineRun
from manycard.benchmark.results import write_json
from manycard.benchmark.row import RowSpec
from manycard.cards import choose_cards
from manycard.errors import RankFailed
from manycard.launch import launch_script
from manycard.parallel import Parallel
from manycard.strategies import STRATEGIES

__all__ = ["ProgressFile", "main", "measure"]


class ProgressFile:
    """Tells the process that waits for this one how far it is, at most ten times a second."""

    def __init__(self, path: Path | None, total: int) -> None:
        self._file = path.open("w", encoding="utf-8") if path is not None else None
        self._total = total
        self._next = 0.0

    def note(self, done: int) -> None:
        """`done` steps were handed to the cards."""
        now = time.perf_counter()
        if self._file is not None and (now >= self._next or done == self._total):
            print(done, self._total, file=self._file, flush=True)
            self._next = now + 0.1

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()


def measure(
    spec: RowSpec,
    parallel: Any,
    progress_path: Path | None = None,
    timeline: Callable[[Any, Any], dict[str, Any]] | None = None,
) -> Measurement:
    """Train as `spec` says and measure it.

    Args:
        spec: the row.
        parallel: a `Parallel` or `PipelineRun` with the row's strategy, cards, precision and seed.
        progress_path: where to say how far it is; None says nothing.
        timeline: called with the step and a batch when all else is measured; where the time goes.

    Raises:
        LockstepError: replicas differ after the timed steps.
    """
    workload, feeding = spec.make_workload(), spec.feeding()
    torch.manual_seed(spec.seed)
    plain = workload.make_model()
    model, optimizer = parallel.setup(plain, workload.make_optimizer(plain))
    # The losses here are known to be means over samples. The check would put the whole batch on one card.
    step = parallel.train_step(workload.loss, model, optimizer, check_loss=False)
    strategy = parallel.strategy
    devices = [parallel.device] if strategy.ranks else [card.device for card in parallel.cards]

    losses: list[Any] = []
    clock = StepClock(devices, strategy.peers.barrier)
    progress = ProgressFile(progress_path if parallel.is_primary else None, workload.total_steps(feeding))
    warmup = workload.warmup_steps(feeding)
    for number, (batch, samples) in enumerate(workload.batches(parallel, feeding)):
        if number == warmup:
            reset_peak_memory(devices)
            clock.start()
        losses.append(step(batch).detach())
        clock.count(samples)
        progress.note(number + 1)
    clock.stop()
    progress.close()

    peaks = [peak for own in strategy.peers.gather_objects(peak_memory_mib(devices)) for peak in own]
    values = [finite(value) for value in torch.stack(losses).double().tolist()]
    parallel.check_lockstep(model)
    return spec.measurement(
        samples_per_s=clock.samples_per_s,
        step_ms=clock.step_ms,
        peak_memory_mib=tuple(peaks) if not spec.simulated else (None,) * len(spec.card_names),
        balance=balance_of(peaks),
        shares=strategy.shares(model),
        losses=tuple(values),
        final_loss=values[-1],
        accuracy=workload.accuracy(parallel, model, feeding),
        timeline=timeline(step, batch) if timeline is not None else None,
        repeats=1,
    )


def _run(spec: RowSpec, folder: Path) -> Measurement | None:
    """The row's result, or None in a process whose rank 0 writes it."""
    if spec.strategy == PIPELINE:
        run = PipelineRun(spec)
        try:
            return measure(spec, run, folder / "progress", run.timeline)
        finally:
            run.close()
    if STRATEGIES[spec.strategy].ranks and "RANK" not in os.environ:
        command = ["-m", "manycard.benchmark.worker", str(folder)]
        launch_script(command, choose_cards(spec.cards).cards)
        return None
    parallel = Parallel(strategy=spec.strategy, cards=spec.cards, precision=spec.precision, seed=spec.seed)
    try:
        found = measure(spec, parallel, folder / "progress")
        return found if parallel.is_primary else None
    finally:
        parallel.close()


def main(arguments: list[str]) -> int:
    """Run the row in the folder named by the only argument."""
    folder = Path(arguments[0])
    spec = RowSpec.from_json((folder / "row.json").read_text(encoding="utf-8"))
    try:
        found = _run(spec, folder)
    except Exception as error:
        if "RANK" in os.environ:
            raise  # the process that started the ranks says it, once
        trace = error.trace if isinstance(error, RankFailed) else traceback.format_exc()
        found = spec.measurement(error=describe_failure(error), trace=trace)
    if found is not None:
        write_json(folder / "result.json", found.to_row())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
