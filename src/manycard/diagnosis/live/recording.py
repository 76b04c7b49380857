"""Samples in a file, one JSON object a line, so that a run can be looked at again later or elsewhere."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from manycard.diagnosis.live.imbalance import imbalance
from manycard.diagnosis.live.sample import CardSample, Sample
from manycard.errors import DataError, SettingError

__all__ = ["Recorder", "read_recording", "summarise"]


class Recorder:
    """Writes samples as they come; a context manager. Each line is whole in the file before the next look.

    Args:
        path: the file, which is made anew.

    Raises:
        SettingError: it can't be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as failure:
            raise SettingError(
                "--record",
                str(path),
                f"it can't be written: {failure.strerror}",
                fix="name a file in a folder that is there",
            ) from None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, sample: Sample) -> None:
        """Add a sample."""
        self._file.write(sample.to_json() + "\n")
        self._file.flush()


def read_recording(path: Path) -> Iterator[Sample]:
    """The samples of a file, one after the other.

    An incomplete last line, as of a recording that was killed, is left out.

    Raises:
        SettingError: the file can't be read.
        DataError: a line is no sample.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as failure:
        raise SettingError(
            "--replay", str(path), f"it can't be read: {failure.strerror}", fix="name a file that --record has written"
        ) from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            sample = Sample.from_json(line)
        except ValueError as wrong:
            if number == len(lines) and number > 1:
                return
            raise DataError(
                f"{path}, line {number}: {wrong}", fix="name a file that manycard monitor --record has written"
            ) from None
        yield sample


def summarise(samples: Sequence[Sample]) -> dict[str, Any]:
    """A recording in figures: how long, and each card's means and peaks."""
    names = dict.fromkeys(card.name for sample in samples for card in sample.cards)
    return {
        "samples": len(samples),
        "seconds": samples[-1].time - samples[0].time if samples else 0.0,
        "cards": [_card(name, samples) for name in names],
        "imbalance": imbalance(samples, last=len(samples)),
    }


def _card(name: str, samples: Sequence[Sample]) -> dict[str, Any]:
    seen = [card for sample in samples for card in sample.cards if card.name == name]

    def known(read: Callable[[CardSample], float | None]) -> list[float]:
        return [value for card in seen if (value := read(card)) is not None]

    def mean(values: list[float]) -> float | None:
        return statistics.fmean(values) if values else None

    return {
        "name": name,
        "model": seen[-1].model,
        "use_mean": mean(known(lambda card: card.use)),
        "use_max": max(known(lambda card: card.use), default=None),
        "memory_used_max": max(known(lambda card: card.memory_used), default=None),
        "memory_total": seen[-1].memory_total,
        "power_mean": mean(known(lambda card: card.power)),
        "power_max": max(known(lambda card: card.power), default=None),
        "temperature_max": max(known(lambda card: card.temperature), default=None),
        "nvlink_in_mean": mean(known(lambda card: card.nvlink_in)),
        "pcie_in_mean": mean(known(lambda card: card.pcie_in)),
    }
