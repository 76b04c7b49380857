"""Running an ablation: every row in its own process, in interleaved rounds, each kept as soon as it is done.

A row of the document has what a row of a benchmark has, and: ``part`` (``baseline``, ``alone``, ``together``),
``step``, ``title``, ``gain`` (its speed over that of the row it stands on), ``total`` (over the baseline), ``skipped``
(why the step doesn't apply here; such a row has no figures and is no failure).
"""

from __future__ import annotations

from typing import Any

from manycard.benchmark.ablation.plan import AblationRow, AblationSettings, AblationSpec, plan_rows
from manycard.benchmark.ablation.recipe import Recipe
from manycard.benchmark.journal import Journal
from manycard.benchmark.machine import describe_machine
from manycard.benchmark.measurement import Measurement, median_of
from manycard.benchmark.rounds import Watcher, run_rounds

__all__ = ["run_ablation"]


def run_ablation(settings: AblationSettings, watcher: Watcher, journal: Journal | None = None) -> dict[str, Any]:
    """Run every row and return the document of results.

    Args:
        journal: keeps every round; what it holds already isn't run again.
    """
    rows = plan_rows(settings)
    running = [row for row in rows if row.why_not is None]
    specs = list(dict.fromkeys(spec for row in running for spec in (row.beside, row.spec) if spec is not None))
    kept = journal or Journal()
    machine = describe_machine(settings.cards)

    def document(*, interrupted: bool = False) -> dict[str, Any]:
        found = {spec: median_of(rounds) for spec in specs if (rounds := kept.rounds(spec))}
        return {
            "ablation": True,
            "rows": [made for row in rows if (made := _row(row, found)) is not None],
            "notes": _notes(settings),
            "machine": machine,
            "settings": _record(settings),
            "interrupted": interrupted,
        }

    try:
        run_rounds(specs, settings.repeats, settings.time_limit, kept, watcher, document)
    except KeyboardInterrupt:
        return document(interrupted=True)
    return document()


def _row(row: AblationRow, found: dict[AblationSpec, Measurement]) -> dict[str, Any] | None:
    """One row of the document; None where it has not run yet."""
    own: dict[str, Any] = {
        "part": row.part,
        "step": row.step,
        "title": row.title,
        "gain": None,
        "total": None,
        "skipped": row.why_not,
    }
    if row.why_not is not None:
        return {**row.spec.measurement().to_row(), **own}
    measured = found.get(row.spec)
    if measured is None:
        return None
    own["gain"] = _ratio(measured, found.get(row.beside) if row.beside else None)
    own["total"] = _ratio(measured, next((each for spec, each in found.items() if spec.recipe == Recipe()), None))
    return {**measured.to_row(), **own}


def _ratio(row: Measurement, other: Measurement | None) -> float | None:
    if other is None or not other.samples_per_s or row.samples_per_s is None:
        return None
    return row.samples_per_s / other.samples_per_s


def _notes(settings: AblationSettings) -> list[str]:
    notes = [
        f"Every row trains {settings.workload} on the same global batch of {settings.global_batch:,}; alone, a setting "
        "is compared with the way that it stands on (nn.DataParallel, DDP or the engine); together, with the row above."
    ]
    if settings.simulated:
        notes.append(
            "The cards are simulated and share one CPU: the rows show what is computed, not what a setting is worth "
            "on GPUs."
        )
    return notes


def _record(settings: AblationSettings) -> dict[str, Any]:
    return {
        "workloads": [settings.workload],
        "batch": settings.global_batch,
        "only": list(settings.only),
        "files": None if settings.files is None else str(settings.files),
        "repeats": settings.repeats,
        "steps": settings.steps,
        "seed": settings.seed,
        "small": settings.small,
        "time_limit": settings.time_limit,
        "lengths": {settings.workload: "until steady" if settings.steps is None else f"{settings.steps} steady steps"},
    }
