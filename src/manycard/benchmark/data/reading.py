"""Images/s from files, by backend and by workers, against what the training needs.

Behaviour:
    * Every backend that can work here, with each number of workers, decodes the same images. Rounds are interleaved;
      a row's figure is the median of its rounds. Files are read once beforehand, so the disk is not what is measured.
    * A backend that fails is a row with its error; one that can't work here is listed with what it lacks.
    * The advice names the fastest row; where it is known what the training needs, the cheapest row that gives a tenth
      more than that, or by how much all of them fall short.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from manycard.benchmark.machine import describe_machine
from manycard.cards import Card
from manycard.data.image_files.backends import BACKENDS, default_workers, make_backend, run_once
from manycard.data.image_files.folder import find_images
from manycard.data.image_files.recipe import IMAGENET_MEAN, IMAGENET_STD, Recipe, Request, make_recipe
from manycard.errors import SettingError

__all__ = ["ReadingSettings", "measure_reading"]

_ENOUGH = 1.1
"""How much more than the training needs a backend should give: decoding shares the host with the training."""
_ON_CARDS = ("dali-mixed", "card")


@dataclass(frozen=True)
class ReadingSettings:
    """What is to be measured."""

    folder: Path
    """Holds the images, at any depth."""
    cards: tuple[Card, ...] = ()
    """Where backends on cards decode; simulated cards leave those out."""
    size: int = 224
    """Height and width of what training sees."""
    batch: int = 256
    """Images in a batch."""
    backends: tuple[str, ...] = ()
    """Names; without any all that can work here."""
    workers: tuple[int, ...] = ()
    """Numbers of workers; without any 1, 2, 4, ... up to the cores."""
    rounds: int = 3
    """How often each row is timed."""
    seconds: float = 2.0
    """About what one round of a row takes; at least one batch is decoded."""
    needed: float | None = None
    """Images/s that the training uses; None where that is not known."""

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise SettingError("PATH", str(self.folder), "there is no such folder", fix=_MAKE)
        for name in self.backends:
            if name not in BACKENDS:
                raise SettingError("--backends", name, "there is no such backend", fix=f"give {', '.join(BACKENDS)}")
        for setting, values in (("--workers", self.workers), ("--size, --batch and --rounds", self._counts())):
            if any(value < 1 for value in values):
                raise SettingError(setting, values, "each must be at least 1")
        if self.needed is not None and self.needed <= 0:
            raise SettingError("--needs", self.needed, "it must be above 0 images/s")

    def _counts(self) -> tuple[int, ...]:
        return (self.size, self.batch, self.rounds)


_MAKE = "write photographs to measure on: manycard bench data --make 1000 FOLDER"


def measure_reading(settings: ReadingSettings, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Time every row.

    Args:
        settings: what is to be measured.
        say: hears what is being done.

    Returns:
        ``{"rows": [...], "left_out": {...}, "images": ..., "needed": ..., "advice": ..., "use": ..., "machine": ...}``;
        a row has ``backend``, ``workers``, ``images_per_s``, ``all_rounds`` and ``error``.

    Raises:
        SettingError: there is no image in the folder.
    """
    files = list(find_images(settings.folder))[: 16 * settings.batch]
    if not files:
        raise SettingError("PATH", str(settings.folder), "there is no image in it", fix=_MAKE)
    size = sum(len(Path(file).read_bytes()) for file in files) / len(files)
    requests = [Request(files[index % len(files)], index) for index in range(max(len(files), settings.batch))]
    recipe = make_recipe(settings.size, True, IMAGENET_MEAN, IMAGENET_STD, torch.float32)
    rows, left_out = _rows(settings)
    _time(rows, settings, requests, recipe, say)
    use, advice = advise(rows, settings.needed)
    return {
        "folder": str(settings.folder),
        "images": len(files),
        "mean_kilobytes": round(size / 1000, 1),
        "size": settings.size,
        "batch": settings.batch,
        "rows": rows,
        "left_out": left_out,
        "needed": settings.needed,
        "use": use,
        "advice": advice,
        "machine": describe_machine(settings.cards),
    }


def _rows(settings: ReadingSettings) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The rows to time, and what the other backends lack."""
    most = default_workers()
    counts = settings.workers or tuple(sorted({min(2**power, most) for power in range(most.bit_length() + 1)}))
    rows, left_out = [], {}
    for name in settings.backends or BACKENDS:
        missing = BACKENDS[name].missing()
        if missing is None and name in _ON_CARDS and not _gpus(settings.cards):
            missing = "a CUDA card"
        if missing is not None:
            left_out[name] = missing
            continue
        # On cards the host's part is small, and one number of workers shows it.
        rows += [{"backend": name, "workers": count} for count in (counts[-1:] if name in _ON_CARDS else counts)]
    return [{**row, "images_per_s": None, "all_rounds": [], "error": None} for row in rows], left_out


def _gpus(cards: Sequence[Card]) -> list[int]:
    return [card.device.index for card in cards if card.device.type == "cuda"]


def _time(
    rows: list[dict[str, Any]],
    settings: ReadingSettings,
    requests: list[Request],
    recipe: Recipe,
    say: Callable[[str], None],
) -> None:
    for turn in range(settings.rounds):
        for row in rows:
            if row["error"] is not None:
                continue
            say(f"round {turn + 1} of {settings.rounds}: {row['backend']}, {row['workers']} workers")
            try:
                row["all_rounds"].append(_time_row(row, settings, requests, recipe))
            except Exception as error:  # a row's failure is its result, whatever a library raises
                row["error"] = str(error).splitlines()[0] if str(error) else type(error).__name__
    for row in rows:
        if row["all_rounds"] and row["error"] is None:
            row["images_per_s"] = round(statistics.median(row["all_rounds"]), 1)


def _time_row(row: dict[str, Any], settings: ReadingSettings, requests: list[Request], recipe: Recipe) -> float:
    """Images/s of one round: started, warmed up, timed, ended, so that rows never share the cores."""
    backend = make_backend(recipe, requests, row["backend"], row["workers"], _gpus(settings.cards) or None)
    try:
        speed = run_once(backend, requests[: settings.batch])
        batches = max(1, round(speed * settings.seconds / settings.batch))
        taken, done = 0.0, 0
        for number in range(batches):
            first = number * settings.batch % max(1, len(requests) - settings.batch + 1)
            batch = requests[first : first + settings.batch]
            taken += len(batch) / run_once(backend, batch)
            done += len(batch)
        return done / taken
    finally:
        backend.close()


def advise(rows: Sequence[dict[str, Any]], needed: float | None) -> tuple[dict[str, Any] | None, str]:
    """Which row to use, and why in words."""
    timed = [row for row in rows if row["images_per_s"]]
    if not timed:
        return None, "no backend could decode these images"
    best = max(timed, key=lambda row: row["images_per_s"])
    enough = [row for row in timed if needed is not None and row["images_per_s"] >= _ENOUGH * needed]
    chosen = min(enough, key=lambda row: (row["workers"], -row["images_per_s"])) if enough else best
    use = {"backend": chosen["backend"], "workers": chosen["workers"]}
    how = f"backend={chosen['backend']!r}, workers={chosen['workers']}"
    if needed is None:
        return use, f"use {how}: the fastest, {best['images_per_s']:,.0f} images/s"
    if enough:
        return use, (
            f"use {how}: {chosen['images_per_s']:,.0f} images/s where the training needs {needed:,.0f}; it will not "
            "wait for images"
        )
    share = best["images_per_s"] / needed
    return use, (
        f"use {how}: {best['images_per_s']:,.0f} images/s is the fastest, {share:.0%} of the {needed:,.0f} that the "
        "training needs; it will wait for images. Smaller files, more cores or cards with JPEG engines would help"
    )
