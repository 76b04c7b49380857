"""The matrix: rows over workloads, strategies and card counts, each in its own process.

Behaviour:
    * ``single`` runs once, on the first card: it is what speed-up and loss differences are taken from.
    * Rounds are interleaved: every row once, then every row again. A slow minute of the machine so falls on all
      rows, not on one.
    * A row that fails is a row with ``error``; it isn't run in later rounds, and the others go on.
    * The watcher hears of every finished row with the whole document so far, and can save it: an interrupt loses
      the row that was running and nothing else. `run_matrix` then returns what there is, marked ``interrupted``.
"""

from __future__ import annotations

from typing import Any, Protocol

from manycard.benchmark.isolated import run_row
from manycard.benchmark.machine import describe_machine
from manycard.benchmark.measurement import Measurement, compare_with_single, median_of
from manycard.benchmark.pipeline_run import PIPELINE
from manycard.benchmark.row import RowSpec
from manycard.benchmark.settings import MatrixSettings
from manycard.benchmark.workloads import Workload
from manycard.launch import cards_setting

__all__ = ["Watcher", "matrix_notes", "matrix_rows", "run_matrix"]


class Watcher(Protocol):
    """Hears what a running matrix does."""

    def started(self, label: str, round_number: int, rounds: int) -> None:
        """A row begins."""

    def progressed(self, done: int, total: int) -> None:
        """The running row has handed `done` of `total` steps to its cards."""

    def finished(self, row: dict[str, Any], document: dict[str, Any]) -> None:
        """A row ended; `document` holds all rows so far."""


def matrix_rows(settings: MatrixSettings) -> list[RowSpec]:
    """Every row of one round, in the order in which they run."""
    rows = []
    for kind in settings.kinds:
        if "single" in settings.strategies:
            rows.append(_row(settings, kind, "single", 1))
        rows += [
            _row(settings, kind, strategy, count)
            for count in settings.counts
            for strategy in settings.strategies
            if strategy != "single" and not _left_out(settings, strategy)
        ]
    return rows


def matrix_notes(settings: MatrixSettings) -> list[str]:
    """What a reader of the results has to know, one sentence a note."""
    notes = []
    if settings.simulated:
        notes.append(
            "The cards are simulated and share one CPU: the rows show that every strategy computes the same "
            "training, not how fast it is. Memory can't be told apart by card and is left empty."
        )
        if _left_out(settings, "torch_dp") and "torch_dp" in settings.strategies:
            notes.append("torch_dp is left out: nn.DataParallel needs GPUs.")
    if PIPELINE in settings.strategies:
        notes.append("pipeline: each card holds a stage of the model; BatchNorm statistics are those of a micro-batch.")
    if "single" not in settings.strategies:
        notes.append("Without a single row there is no speed-up, no efficiency and no difference of losses.")
    if settings.scaling == "weak" and max(settings.counts) > 1:
        notes.append(
            "Weak scaling: the batch a card is fixed, so the global batch grows with the cards and losses are "
            "compared only where it is the same."
        )
    notes += [f"{kind.name}: {kind.loss_note}." for kind in settings.kinds if kind.loss_note]
    return notes


def run_matrix(settings: MatrixSettings, watcher: Watcher) -> dict[str, Any]:
    """Run every row and return the document of results.

    Returns:
        ``{"rows": [...], "notes": [...], "machine": {...}, "settings": {...}, "interrupted": bool}``; the keys
        of a row are the fields of `Measurement`.
    """
    specs = matrix_rows(settings)
    found: dict[RowSpec, list[Measurement]] = {}
    machine = describe_machine(settings.cards)

    def document(*, interrupted: bool) -> dict[str, Any]:
        rows = [median_of(found[spec]) for spec in specs if spec in found]
        return {
            "rows": [row.to_row() for row in compare_with_single(rows)],
            "notes": matrix_notes(settings),
            "machine": machine,
            "settings": _settings_record(settings),
            "interrupted": interrupted,
        }

    try:
        for round_number in range(1, settings.repeats + 1):
            for spec in specs:
                if any(row.error is not None for row in found.get(spec, [])):
                    continue
                watcher.started(spec.label, round_number, settings.repeats)
                row = run_row(spec, watcher.progressed)
                found.setdefault(spec, []).append(row)
                watcher.finished(row.to_row(), document(interrupted=False))
    except KeyboardInterrupt:
        return document(interrupted=True)
    return document(interrupted=False)


def _left_out(settings: MatrixSettings, strategy: str) -> bool:
    return strategy == "torch_dp" and settings.simulated


def _row(settings: MatrixSettings, kind: type[Workload], strategy: str, count: int) -> RowSpec:
    cards = settings.cards[:count]
    return RowSpec(
        workload=kind.name,
        strategy=strategy,
        cards=cards_setting(cards),
        card_names=tuple(card.name for card in cards),
        simulated=settings.simulated,
        scaling=settings.scaling,
        batch=settings.batch_of(kind, count),
        length=settings.length_of(kind),
        precision=settings.precision,
        seed=settings.seed,
        small=settings.small,
        channels_last=settings.channels_last is not False,
    )


def _settings_record(settings: MatrixSettings) -> dict[str, Any]:
    """The settings as the document keeps them."""
    return {
        "workloads": [kind.name for kind in settings.kinds],
        "strategies": list(settings.strategies),
        "counts": list(settings.counts),
        "precision": settings.precision,
        "scaling": settings.scaling,
        "batch": settings.batch,
        "per_card_batch": settings.per_card_batch,
        "lengths": {kind.name: f"{settings.length_of(kind)} {kind.length_unit}" for kind in settings.kinds},
        "repeats": settings.repeats,
        "seed": settings.seed,
        "small": settings.small,
        "channels_last": settings.channels_last is not False,
    }
