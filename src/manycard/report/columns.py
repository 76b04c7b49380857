"""The columns of a table of benchmark rows, the same in the terminal, in Markdown and in HTML.

Columns of batches, energy, accuracy and differences of losses are there where some row has something to say in them;
so is one for each setting that rows differ in. Everything else always has its column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manycard.report import figures

__all__ = ["Column", "cells", "label_columns", "remarks", "rest_columns", "row_name", "setting_names", "speed_columns"]

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """One column."""

    heading: str
    """With line breaks where there is little room."""
    write: Callable[[Row], str]
    is_label: bool = False
    """Whether it says what was run, not what was found."""


def _of(key: str, write: Callable[[Any], str]) -> Callable[[Row], str]:
    return lambda row: write(row.get(key))


def _of_setting(name: str) -> Callable[[Row], str]:
    return lambda row: figures.setting((row.get("settings") or {}).get(name))


def setting_names(rows: Sequence[Row]) -> list[str]:
    """The settings that some row was given."""
    return list(dict.fromkeys(name for row in rows for name in row.get("settings") or {}))


def label_columns(rows: Sequence[Row]) -> list[Column]:
    """What was run."""
    columns = [
        Column("strategy", lambda row: str(row["strategy"]), True),
        Column("cards", lambda row: str(row["cards"]), True),
    ]
    for name in setting_names(rows):
        heading = name.replace("_", "_\n") if len(name) > 14 else name
        columns.append(Column(heading, _of_setting(name), True))
    if len({row["batch"] for row in rows}) > 1:
        columns.append(Column("global\nbatch", _of("batch", figures.count), True))
    return columns


def speed_columns(rows: Sequence[Row]) -> list[Column]:
    """How fast it was."""
    return [
        Column(f"{rows[0]['unit']}/s", _of("samples_per_s", figures.speed)),
        Column("±", _of("noise", lambda value: figures.percent(value, 1))),
        Column("ms a\nstep", _of("step_ms", figures.speed)),
        Column("speed-up", _of("speedup", figures.times)),
        Column("effi-\nciency", _of("efficiency", figures.percent)),
        Column("first\nstep, s", _of("first_step_s", figures.speed)),
    ]


def rest_columns(rows: Sequence[Row]) -> list[Column]:
    """What else was found."""
    columns = [
        Column("peak memory\na card, MiB", lambda row: figures.memory(row["peak_memory_mib"])),
        Column("balance", _of("balance", figures.ratio)),
        *([Column("shares", _of("shares", figures.shares))] if any(row.get("shares") for row in rows) else []),
        Column("final\nloss", _of("final_loss", figures.loss)),
    ]
    if any(row.get("joules_per_sample") is not None for row in rows):
        columns.insert(2, Column(f"J a\n{rows[0]['unit'].removesuffix('s')}", _of("joules_per_sample", figures.energy)))
    if any(row.get("accuracy") is not None for row in rows):
        columns.append(Column("test\naccuracy", _of("accuracy", lambda value: figures.percent(value, 1))))
    if any(row.get("largest_loss_difference") is not None for row in rows):
        columns.append(Column("losses differ\nfrom single by", _of("largest_loss_difference", figures.difference)))
    return columns


def cells(row: Row, columns: Sequence[Column]) -> list[str]:
    """A row as text."""
    return [column.write(row) for column in columns]


def row_name(row: Row) -> str:
    """A row in words: ``dp on 2, precision=bf16``."""
    settings = "".join(f", {name}={figures.setting(value)}" for name, value in (row.get("settings") or {}).items())
    return f"{row['strategy']} on {row['cards']}{settings}"


def remarks(rows: Sequence[Row]) -> list[tuple[str, bool]]:
    """What has to be said of single rows, each with whether it is an error."""
    found = []
    for row in rows:
        if row["error"] is not None:
            found.append((f"{row_name(row)}: {row['error']}", True))
        if row.get("note"):
            found.append((f"{row_name(row)}: {row['note']}", False))
        if row.get("steady") is False:
            found.append((f"{row_name(row)}: its step times had not settled when it ended", False))
    return found
