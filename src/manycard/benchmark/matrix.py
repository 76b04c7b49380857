"""The matrix: rows over workloads (or a script), strategies, card counts and settings, each in its own process.

Behaviour:
    * ``single`` runs once for each combination of the settings that it reads, on the first card: it is what speed-up
      and loss differences are taken from.
    * A strategy that doesn't read a setting has no rows for its values.
    * Rounds are interleaved (`rounds`), a row that fails is a row with ``error``, and an interrupt keeps the rows that
      are done: `run_matrix` then returns what there is, marked ``interrupted``.
    * In its last round, a row is told what one card did, so that it can say what holds it back (`findings`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from manycard.benchmark.axes import combinations, setting
from manycard.benchmark.findings import add_pipelines, expect
from manycard.benchmark.journal import Journal
from manycard.benchmark.machine import describe_machine
from manycard.benchmark.measurement import Measurement, compare_with_single, median_of
from manycard.benchmark.pipeline_run import PIPELINE
from manycard.benchmark.rounds import Watcher, run_rounds
from manycard.benchmark.row import RowSpec
from manycard.benchmark.settings import MatrixSettings
from manycard.benchmark.workloads import Workload
from manycard.launch import cards_setting

__all__ = ["Watcher", "matrix_notes", "matrix_rows", "run_matrix"]


def matrix_rows(settings: MatrixSettings) -> list[RowSpec]:
    """Every row of one round, in the order in which they run."""
    rows = []
    for kind in settings.subjects:
        pairs = [("single", 1)] if "single" in settings.strategies else []
        pairs += [
            (strategy, count)
            for count in settings.counts
            for strategy in settings.strategies
            if strategy != "single" and not _left_out(settings, strategy)
        ]
        for strategy, count in pairs:
            plain = _row(settings, kind, strategy, count)
            chosen = [each for each in combinations(_axes_for(settings, kind), strategy) if _shared_out(each, count)]
            rows += [replace(plain, settings=each) for each in chosen]
    return rows


def _shared_out(settings: Sequence[tuple[str, Any]], count: int) -> bool:
    """Whether that many cards can be shared out to a row's replicas."""
    return count % int(setting(settings, "replicas", 1)) == 0


def _axes_for(settings: MatrixSettings, kind: type[Workload] | None) -> list[tuple[str, tuple[Any, ...]]]:
    has_images = kind is not None and kind.has_images
    return [axis for axis in settings.axes if axis[0] != "channels_last" or has_images]


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
        replicas = dict(settings.axes).get("replicas", ())
        if any(count % each for count in settings.counts for each in replicas):
            notes.append("pipeline: rows whose cards can't be shared out to that many replicas are left out.")
    if "single" not in settings.strategies:
        notes.append("Without a single row there is no speed-up, no efficiency and no difference of losses.")
    if "weak" in map(settings.scaling_of, settings.subjects) and max(settings.counts) > 1:
        notes.append(
            "Weak scaling: the batch a card is fixed, so the global batch grows with the cards and losses are "
            "compared only where it is the same."
        )
    if settings.script is not None:
        notes.append(
            f"{settings.script_name}: steps are timed from inside, up to where the speed is known; what the script "
            "does between epochs isn't timed."
        )
    notes += [f"{kind.name}: {kind.loss_note}." for kind in settings.kinds if kind.loss_note]
    return notes


def run_matrix(settings: MatrixSettings, watcher: Watcher, journal: Journal | None = None) -> dict[str, Any]:
    """Run every row and return the document of results.

    Args:
        journal: keeps every round; what it holds already isn't run again.

    Returns:
        ``{"rows": [...], "notes": [...], "machine": {...}, "settings": {...}, "interrupted": bool}``; the keys
        of a row are the fields of `Measurement`.
    """
    specs = matrix_rows(settings)
    machine = describe_machine(settings.cards)
    kept = journal or Journal()

    def measured() -> list[Measurement]:
        rows = [median_of(rounds) for spec in specs if (rounds := kept.rounds(spec))]
        return add_pipelines(compare_with_single(rows))

    def expected(spec: RowSpec, number: int) -> dict[str, Any] | None:
        """What is expected of a row in its last round, by when all rounds of one card are there."""
        found = expect(spec, measured(), kept.rounds(spec)) if number == settings.repeats else None
        return None if found is None else found.as_dict()

    def document(*, interrupted: bool = False) -> dict[str, Any]:
        return {
            "rows": [row.to_row() for row in measured()],
            "notes": matrix_notes(settings),
            "machine": machine,
            "settings": _settings_record(settings),
            "interrupted": interrupted,
        }

    try:
        run_rounds(specs, settings.repeats, settings.time_limit, kept, watcher, document, expected)
    except KeyboardInterrupt:
        return document(interrupted=True)
    return document()


def _left_out(settings: MatrixSettings, strategy: str) -> bool:
    return strategy == "torch_dp" and settings.simulated


def _row(settings: MatrixSettings, kind: type[Workload] | None, strategy: str, count: int) -> RowSpec:
    cards = settings.cards[:count]
    return RowSpec(
        workload=settings.name_of(kind),
        strategy=strategy,
        cards=cards_setting(cards),
        card_names=tuple(card.name for card in cards),
        simulated=settings.simulated,
        scaling=settings.scaling_of(kind),
        batch=settings.batch_of(kind, count),
        steps=settings.steps,
        epochs=settings.epochs_of(kind),
        precision=settings.precision,
        seed=settings.seed,
        small=settings.small,
        channels_last=settings.channels_last is not False,
        script=() if settings.script is None else tuple(settings.script.argv),
    )


def _settings_record(settings: MatrixSettings) -> dict[str, Any]:
    """The settings as the document keeps them."""
    return {
        "workloads": [settings.name_of(kind) for kind in settings.subjects],
        "script": None if settings.script is None else settings.script.argv,
        "strategies": list(settings.strategies),
        "counts": list(settings.counts),
        "axes": {name: list(values) for name, values in settings.axes},
        "precision": settings.precision,
        "scaling": settings.scaling_of(settings.subjects[0]),
        "batch": settings.batch,
        "per_card_batch": settings.per_card_batch,
        "lengths": {settings.name_of(kind): settings.length_of(kind) for kind in settings.subjects},
        "repeats": settings.repeats,
        "seed": settings.seed,
        "small": settings.small,
        "channels_last": settings.channels_last is not False,
        "time_limit": settings.time_limit,
    }
