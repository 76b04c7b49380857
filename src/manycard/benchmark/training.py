"""One row of a built-in workload: trained and measured in this process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from manycard.benchmark.axes import compile_argument, ddp_options, setting
from manycard.benchmark.energy import EnergyMeter
from manycard.benchmark.measurement import Measurement, finite, found_by
from manycard.benchmark.meter import StepMeter
from manycard.benchmark.profiled import Expected, Look
from manycard.benchmark.progress_file import ProgressFile
from manycard.benchmark.results import write_json
from manycard.benchmark.row import RowSpec
from manycard.benchmark.workloads import Feeding, Workload
from manycard.errors import ManycardError
from manycard.parallel import Parallel

__all__ = ["MOST_LOSSES", "fused", "make_meter", "make_parallel", "measure"]

MOST_LOSSES = 1000
"""Losses that are kept of a row: those of its first steps."""


def make_parallel(spec: RowSpec) -> Parallel:
    """`Parallel` as the row wants it."""
    return Parallel(
        strategy=spec.strategy,
        cards=spec.cards,
        precision=str(setting(spec.settings, "precision", spec.precision)),
        accumulate=setting(spec.settings, "accumulate", 1),
        sync_batchnorm=setting(spec.settings, "sync_batchnorm", False),
        compile=compile_argument(spec.settings) or False,
        ddp_options=ddp_options(spec.settings),
        seed=spec.seed,
    )


def make_meter(
    spec: RowSpec, parallel: Any, energy: EnergyMeter, began: float, on_progress: Callable[[int, int], None]
) -> StepMeter:
    """A meter of the steps of `parallel` in this process."""
    strategy = parallel.strategy
    devices = [parallel.device] if strategy.ranks else [card.device for card in parallel.cards]
    return StepMeter(devices, strategy.peers, spec.goal, began, joules=energy.joules, on_progress=on_progress)


def fused(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimizer with PyTorch's fused update.

    Raises:
        ManycardError: it has none.
    """
    known = inspect.signature(type(optimizer)).parameters
    if "fused" not in known:
        raise ManycardError(f"{type(optimizer).__name__} has no fused update", fix="leave fused=on out")
    kept = {name: value for name, value in optimizer.defaults.items() if name in known and name != "foreach"}
    return type(optimizer)(optimizer.param_groups, **{**kept, "fused": True})


def measure(
    spec: RowSpec,
    parallel: Any,
    began: float,
    progress_path: Path | None = None,
    timeline: Callable[[Any, Any], dict[str, Any]] | None = None,
    expected: Expected | None = None,
) -> Measurement:
    """Train as `spec` says and measure it.

    Args:
        spec: the row.
        parallel: a `Parallel` or `PipelineRun` with the row's strategy, cards, precision and seed.
        began: ``time.time()`` when the row began.
        progress_path: where to say how far it is; None says nothing.
        timeline: called with the step and a batch when all else is measured; where the time goes.
        expected: what its speed is compared with; a row that is slower says why.

    Raises:
        LockstepError: replicas differ after the timed steps.
    """
    workload, feeding = spec.make_workload(), spec.feeding()
    model, step = _set_up(spec, parallel, workload)
    losses: list[Any] = []
    newest: Any = None
    total, walk = workload.total_steps(feeding), workload.batches(parallel, feeding)
    with (
        ProgressFile(progress_path if parallel.is_primary else None) as progress,
        EnergyMeter(parallel.cards if parallel.is_primary else []) as energy,
    ):
        meter = make_meter(spec, parallel, energy, began, lambda done, expected: progress.note(done, total or expected))
        for batch, samples in walk:
            newest = step(batch).detach()
            if len(losses) < MOST_LOSSES:
                losses.append(newest)
            if meter.step(samples if parallel.is_primary else 0):
                break
        figures = meter.figures()
    values = [finite(value) for value in torch.stack([*losses, newest]).double().tolist()]
    parallel.check_lockstep(model)
    found = {} if figures is None else found_by(figures, simulated=spec.simulated)
    row = spec.measurement(
        **found,
        losses=tuple(values[:-1]),
        final_loss=values[-1],
        shares=parallel.strategy.shares(model),
        accuracy=workload.accuracy(parallel, model, feeding),
        timeline=timeline(step, batch) if timeline is not None else None,
        error="it has one step only, and so no steps to time" if figures is None else None,
    )
    if expected is None:
        return row
    if progress_path is not None and parallel.is_primary:
        write_json(progress_path.parent / "result.json", row.to_row())  # so that nothing that follows can lose it
    more = _without_end(walk, workload, parallel, feeding)
    return Look(parallel.strategy, expected).into(row, lambda: step(next(more)[0]))


def _set_up(spec: RowSpec, parallel: Any, workload: Workload) -> tuple[Any, Any]:
    """The model and its train step."""
    torch.manual_seed(spec.seed)
    plain = workload.make_model()
    optimizer = workload.make_optimizer(plain)
    if setting(spec.settings, "fused", False):
        optimizer = fused(optimizer)
    model, optimizer = parallel.setup(plain, optimizer)
    # The losses here are known to be means over samples. The check would put the whole batch on one card.
    graphs = setting(spec.settings, "graphs", "auto")
    return model, parallel.train_step(workload.loss, model, optimizer, check_loss=False, graphs=graphs)


def _without_end(
    walk: Iterator[tuple[Any, int]], workload: Workload, parallel: Any, feeding: Feeding
) -> Iterator[tuple[Any, int]]:
    """The rest of `walk`, and further epochs after it."""
    return chain(walk, chain.from_iterable(workload.batches(parallel, feeding) for _ in count()))
