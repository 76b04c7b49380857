"""Samples of ``manycard monitor``: a table with histories for a terminal that moves, lines for everything else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from manycard.cards import in_words
from manycard.cards.memory_size import GIB
from manycard.diagnosis.live import CardSample, JobSample, Sample, imbalance

__all__ = ["draw", "lines", "sparkline"]

_BARS = "▁▂▃▄▅▆▇█"
_MOST_PROCESSES = 2
_PLAIN_BARS = "_.:-=+*#"
_WIDTH = 12
"""Looks in a history: what leaves room for all columns in 80."""


def sparkline(values: Sequence[float | None], most: float, *, width: int = _WIDTH, plain: bool = False) -> str:
    """The last values as bars; a gap where one is not known.

    Args:
        values: the oldest first.
        most: what a full bar stands for.
        width: how many of them are shown.
        plain: with letters that every terminal has.

    Example:
        >>> sparkline([0, 50, None, 100], 100)
        '▁▅ █'
    """
    bars = _PLAIN_BARS if plain else _BARS

    def bar(value: float | None) -> str:
        if value is None or most <= 0:
            return " "
        return bars[min(max(round(value / most * (len(bars) - 1)), 0), len(bars) - 1)]

    return "".join(bar(value) for value in values[-width:])


def draw(samples: Sequence[Sample], *, plain: bool = False) -> RenderableType:
    """A table of the newest sample, with the histories of use and memory, and what is unequal below.

    Args:
        samples: the oldest first; at least one.
        plain: histories with letters that every terminal has.
    """
    newest = samples[-1]
    parts: list[RenderableType] = []
    if newest.cards:
        parts.append(_cards_table(samples, plain))
    elif newest.note:
        parts.append(f"No GPU: {escape(newest.note)}.")
    if newest.jobs:
        parts.append(_jobs_table(newest))
    elif not newest.cards:
        parts.append("No run of manycard here. Start one, or watch any process with --pid.")
    parts += [f"[yellow]unequal:[/] {escape(line)}" for line in imbalance(samples)]
    cpu = "" if newest.cpu is None else f"host CPU {newest.cpu:.0f} %  "
    parts.append(f"[dim]{cpu}{time.strftime('%H:%M:%S', time.localtime(newest.time))}[/]")
    return Group(*parts)


def _cards_table(samples: Sequence[Sample], plain: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("card", "use", "memory, GiB", "power, heat", "PCIe, GB/s", "NVLink, GB/s", "processes"):
        table.add_column(column, overflow="fold", min_width=_WIDTH if column in ("use", "memory, GiB") else None)
    for card in samples[-1].cards:
        use = _history(samples, card.name, lambda each: each.use)
        held = _history(samples, card.name, lambda each: each.memory_used)
        power = "-" if card.power is None else f"{card.power:.0f}"
        power += "" if card.power_limit is None else f"/{card.power_limit:.0f} W"
        heat = "-" if card.temperature is None else f"{card.temperature} °C"
        table.add_row(
            f"{card.name}\n{escape(card.model.removeprefix('NVIDIA '))}",
            f"{_percent(card.use)}\n{sparkline(use, 100, plain=plain)}",
            f"{_memory(card, short=True)}\n{sparkline(held, card.memory_total or 0, plain=plain)}",
            f"{power}\n{heat}",
            f"in  {_gigabytes(card.pcie_in)}\nout {_gigabytes(card.pcie_out)}",
            f"in  {_gigabytes(card.nvlink_in)}\nout {_gigabytes(card.nvlink_out)}",
            _processes(card),
        )
    return table


def _jobs_table(sample: Sample) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("run", "cards", "CPU", "host memory", "command"):
        table.add_column(column, overflow="fold")
    for job in sample.jobs:
        table.add_row(str(job.pid), _cards_of(job), _cores(job.cpu), in_words(job.memory), escape(job.command))
        for process in job.processes:
            if process.rank is not None:
                table.add_row("", f"rank {process.rank}", _cores(process.cpu), in_words(process.memory), "")
    return table


def lines(sample: Sample) -> list[str]:
    """A sample in plain lines, one a card and one a run, for logs and pipes."""
    at = time.strftime("%H:%M:%S", time.localtime(sample.time))
    found = []
    for card in sample.cards:
        power = "-" if card.power is None else f"{card.power:.0f} W"
        heat = "-" if card.temperature is None else f"{card.temperature} °C"
        found.append(
            f"{at} {card.name} ({card.model}): use {_percent(card.use)}, memory {_memory(card)}, {power}, {heat}, "
            f"PCIe {_rate(card.pcie_in)} in {_rate(card.pcie_out)} out, NVLink {_rate(card.nvlink_in)} in "
            f"{_rate(card.nvlink_out)} out, processes {_processes(card).replace(chr(10), ', ')}"
        )
    for job in sample.jobs:
        ranks = "".join(
            f"; rank {process.rank}: {_cores(process.cpu)}, {in_words(process.memory)}"
            for process in job.processes
            if process.rank is not None
        )
        found.append(
            f"{at} run {job.pid} on {_cards_of(job)}: {_cores(job.cpu)} CPU, {in_words(job.memory)} of host memory: "
            f"{job.command}{ranks}"
        )
    if not found:
        found.append(f"{at} no GPU ({sample.note or 'none is shown'}) and no run of manycard")
    return found


def _history(samples: Sequence[Sample], name: str, read: Callable[[CardSample], float | None]) -> list[float | None]:
    found: list[float | None] = []
    for sample in samples:
        card = next((card for card in sample.cards if card.name == name), None)
        found.append(None if card is None else read(card))
    return found


def _cards_of(job: JobSample) -> str:
    if job.cards:
        return ", ".join(job.cards)
    if job.simulated is not None:
        return f"{job.simulated} simulated card{'s'[: job.simulated > 1]} (they share the CPU)"
    return "the CPU, as far as can be seen"


def _percent(value: int | None) -> str:
    return "-" if value is None else f"{value} %"


def _cores(percent: float | None) -> str:
    return "-" if percent is None else f"{percent / 100:.2f} cores"


def _memory(card: CardSample, *, short: bool = False) -> str:
    if short and card.memory_used is not None and card.memory_total is not None:
        return f"{card.memory_used / GIB:.1f} / {card.memory_total / GIB:.0f}"
    return f"{in_words(card.memory_used)} / {in_words(card.memory_total)}"


def _rate(bytes_a_second: float | None) -> str:
    if bytes_a_second is None:
        return "-"
    if bytes_a_second >= 1e9:
        return f"{bytes_a_second / 1e9:.1f} GB/s"
    return f"{bytes_a_second / 1e6:.0f} MB/s"


def _gigabytes(bytes_a_second: float | None) -> str:
    return "-" if bytes_a_second is None else f"{bytes_a_second / 1e9:.1f}"


def _processes(card: CardSample) -> str:
    if card.processes is None:
        return "not told"
    if not card.processes:
        return "none"
    shown = [
        f"{each.pid} {in_words(each.memory) if each.memory is not None else ''}".strip() for each in card.processes
    ]
    if len(shown) > _MOST_PROCESSES:
        shown = [*shown[: _MOST_PROCESSES - 1], f"and {len(shown) - _MOST_PROCESSES + 1} more"]
    return "\n".join(shown)
