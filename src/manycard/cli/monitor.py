"""``manycard monitor``: the cards live, and what the cards of a run do unequally.

Behaviour:
    * On a terminal a table that moves; elsewhere (a pipe, a log) lines, one a card and one a run, each interval.
    * JOB or ``--pid`` shows one run, the cards its processes have memory on, and ends when it ends.
    * Without GPUs, runs of manycard are shown with the CPU and the memory they take: simulated cards share both, and
      have no figures of their own.
    * ``--record FILE`` writes every sample as a line of JSON; ``--replay FILE`` shows them again, at their own pace on
      a terminal.
    * ``--json`` prints one document, of one look, or of a whole recording with ``--replay``.
    * Ctrl-C ends it with status 0, as does the end of the run that is watched. Status 2: wrong usage.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from manycard.cli.options import JsonOption, print_json, say
from manycard.diagnosis.live import (
    Job,
    LiveReader,
    Recorder,
    Sample,
    find_job,
    imbalance,
    job_of,
    read_recording,
    summarise,
)
from manycard.errors import DataError, SettingError
from manycard.report.monitor import draw, lines

__all__ = ["monitor"]

_KEPT = 300
"""Samples that are kept for histories."""
_FIRST_WAIT = 0.5
"""Seconds between the two looks that a single sample takes, since rates need two."""
_LEAST_INTERVAL = 0.1

_JobArgument = Annotated[
    str | None,
    typer.Argument(metavar="JOB", help="A running script's file name: show its cards alone.", show_default=False),
]
_PidOption = Annotated[
    int | None, typer.Option("--pid", help="A running process: show its cards alone.", show_default=False)
]
_IntervalOption = Annotated[float, typer.Option("--interval", help="Seconds between two looks.")]
_OnceOption = Annotated[bool, typer.Option("--once", help="Look once, and end.")]
_SamplesOption = Annotated[int | None, typer.Option("--samples", help="End after so many looks.", show_default=False)]
_RecordOption = Annotated[
    Path | None, typer.Option("--record", metavar="FILE", help="Also write every sample to FILE, a line of JSON each.")
]
_ReplayOption = Annotated[
    Path | None, typer.Option("--replay", metavar="FILE", help="Show what --record has written, instead of looking.")
]


def monitor(
    job: _JobArgument = None,
    *,
    pid: _PidOption = None,
    interval: _IntervalOption = 1.0,
    once: _OnceOption = False,
    samples: _SamplesOption = None,
    record: _RecordOption = None,
    replay: _ReplayOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the cards live: use, memory, power, heat, traffic, processes, and what is unequal among them.

    \b
    Examples:
      manycard monitor
      manycard monitor train.py --record run.jsonl
      manycard monitor --replay run.jsonl
      manycard monitor --once --json
      ssh box manycard monitor --interval 5
    """
    if not interval >= _LEAST_INTERVAL:
        raise SettingError("--interval", interval, f"it must be at least {_LEAST_INTERVAL} s", fix="leave it out for 1")
    if samples is not None and samples < 1:
        raise SettingError("--samples", samples, "it must be at least 1", fix="leave it out to go on until Ctrl-C")
    if samples is not None and (once or as_json):
        problem = f"{'--once' if once else '--json'} looks once"
        raise SettingError("--samples", samples, problem, fix="leave it out; --record FILE keeps every look of a watch")
    if replay is not None:
        if job is not None or pid is not None or record is not None:
            raise SettingError(
                "--replay", str(replay), "it shows what was recorded, and watches nothing", fix="give it alone"
            )
        _replay(replay, once, as_json)
        return
    if job is not None and pid is not None:
        raise SettingError("--pid", pid, f"JOB ({job}) names a run as well", fix="give one of them")
    watched = job_of(pid) if pid is not None else find_job(job) if job is not None else None
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(LiveReader(watched))
        recorder = stack.enter_context(Recorder(record)) if record is not None else None
        if once or as_json:
            _look_once(reader, recorder, interval, as_json)
        else:
            _watch(_looks(reader, recorder, watched, interval, samples))


def _look_once(reader: LiveReader, recorder: Recorder | None, interval: float, as_json: bool) -> None:
    seen = [reader.read()]
    time.sleep(min(interval, _FIRST_WAIT))
    seen.append(reader.read())
    if recorder is not None:
        recorder.write(seen[-1])
    if as_json:
        print_json({**_plain(seen[-1]), "imbalance": imbalance(seen)})
    else:
        _print(seen)


def _looks(
    reader: LiveReader, recorder: Recorder | None, watched: Job | None, interval: float, most: int | None
) -> Iterator[Sample]:
    """Samples, an interval apart, until Ctrl-C, the end of the run, or `most` of them."""
    done, due = 0, time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        while most is None or done < most:
            if watched is not None and not watched.alive():
                say(f"the run {watched.pid} has ended")
                return
            sample = reader.read()
            if recorder is not None:
                recorder.write(sample)
            yield sample
            done += 1
            due = max(due + interval, time.monotonic())
            if most is None or done < most:
                time.sleep(max(due - time.monotonic(), 0))


def _watch(samples: Iterator[Sample]) -> None:
    """Draw samples as they come: a table that moves on a terminal, else lines."""
    console = Console()
    seen: deque[Sample] = deque(maxlen=_KEPT)
    said: list[str] = []
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        live = stack.enter_context(Live(console=console, auto_refresh=False)) if console.is_terminal else None
        for sample in samples:
            seen.append(sample)
            if live is not None:
                live.update(draw(list(seen), plain=_is_plain(console)), refresh=True)
                continue
            unequal = imbalance(list(seen))
            for line in lines(sample) + ([f"unequal: {each}" for each in unequal] if unequal != said else []):
                _print_line(line)
            said = unequal


def _print(seen: list[Sample]) -> None:
    """One look, for people."""
    console = Console()
    if console.is_terminal:
        console.print(draw(seen, plain=_is_plain(console)))
        return
    for line in lines(seen[-1]) + [f"unequal: {each}" for each in imbalance(seen)]:
        _print_line(line)


def _print_line(line: str) -> None:
    """Print a line at once, on whatever the terminal or the file can show."""
    encoding = sys.stdout.encoding or "utf-8"
    print(line.encode(encoding, "replace").decode(encoding), flush=True)


def _replay(path: Path, once: bool, as_json: bool) -> None:
    recorded = list(read_recording(path))
    if not recorded:
        raise DataError(f"{path} holds no sample", fix="name a file that manycard monitor --record has written")
    if as_json:
        print_json(summarise(recorded))
    elif once:
        _print(recorded[-_KEPT:])
    else:
        _watch(_paced(recorded))


def _paced(recorded: list[Sample]) -> Iterator[Sample]:
    """Samples at the pace at which they were recorded, on a terminal; at once elsewhere."""
    before = recorded[0].time
    wait = Console().is_terminal
    for sample in recorded:
        if wait:
            time.sleep(min(max(sample.time - before, 0), 5))
        before = sample.time
        yield sample


def _plain(sample: Sample) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(sample.to_json())
    return document


def _is_plain(console: Console) -> bool:
    return console.encoding.lower().replace("-", "") != "utf8"
