"""``manycard profile``: where the time of a script's steps goes on each card, and what would make them faster.

Behaviour:
    * The script runs as under ``manycard run``, until ``--steps`` steps were recorded after ``--skip``; then it is
      ended by SystemExit, or runs on with ``--whole``. What it prints goes to standard error.
    * A table and the findings, the biggest gain first, on standard output; with ``--json`` one document.
    * The traces are kept, and their paths printed.
    * Where a GPU's memory is fragmented, the same steps run again under each remedy (`profile_remedies`); the finding
      says what that has changed.
    * A run in ranks that fails shows what `run` shows; with ``--json`` the document comes all the same.
    * Exit status: 0 recorded, whatever was found; 1 the script failed, or made too few steps; 2 wrong usage.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from manycard.cards import choose_cards
from manycard.cli import profile_remedies as remedies
from manycard.cli.options import (
    ArgumentsArgument,
    CardsOption,
    HangTimeoutOption,
    JsonOption,
    ModuleOption,
    NcclOption,
    PrecisionOption,
    ScriptArgument,
    print_json,
    say,
)
from manycard.cli.run import StrategyOption, run_quietly
from manycard.cli.run_request import RunRequest
from manycard.diagnosis.memory_use import Reserve
from manycard.diagnosis.profile import PARTS, Profile, ProfileSettings, merged, split_by_card
from manycard.errors import HangError, RankFailed, SettingError
from manycard.parallel.profiling import VARIABLE, begin_from_environment, end_from_environment, with_fragments

__all__ = ["profile"]

_WIDTH_OF_A_FILE = 120

_StepsOption = Annotated[int, typer.Option("--steps", help="Steps to record.")]
_SkipOption = Annotated[int, typer.Option("--skip", help="Steps before, which compile and warm up.")]
_OutOption = Annotated[
    str | None, typer.Option("--out", metavar="FOLDER", help="Where traces go.", show_default="a new folder")
]
_MemoryOption = Annotated[
    bool, typer.Option("--memory", help="First watch memory for 40 steps, and name what keeps more in each.")
]
_PerCardOption = Annotated[
    bool,
    typer.Option("--per-card", help="Also write a trace a GPU, with a rank each, as HolisticTraceAnalysis reads them."),
]
_WholeOption = Annotated[bool, typer.Option("--whole", help="Let the script run to its end.")]


def profile(
    script: ScriptArgument,
    arguments: ArgumentsArgument = None,
    *,
    module: ModuleOption = False,
    steps: _StepsOption = 8,
    skip: _SkipOption = 5,
    out: _OutOption = None,
    memory: _MemoryOption = False,
    per_card: _PerCardOption = False,
    whole: _WholeOption = False,
    strategy: StrategyOption = None,
    cards: CardsOption = None,
    precision: PrecisionOption = None,
    nccl: NcclOption = None,
    hang_timeout: HangTimeoutOption = None,
    as_json: JsonOption = False,
) -> int:
    """Show where the time of a script's steps goes on each card, and what would make them faster.

    The script may use manycard or not. A step ends with the optimizer's step; of several that take turns (a GAN's),
    with the last one's. Where memory is fragmented, remedies are tried in short runs of the script.

    \b
    Examples:
      manycard profile train.py
      manycard profile --strategy ddp --cards 0,1 train.py --epochs 1
      manycard profile --steps 20 --out traces --json train.py
      manycard profile --memory train.py
    """
    folder = _settings(steps, skip, out).folder()
    for old in folder.glob("profile*.json"):
        old.unlink()
    skip = max(skip, 40) if memory else skip
    asked = {"steps": steps, "skip": skip, "out": str(folder.resolve()), "whole": whole, "memory": memory}
    if os.environ.get(remedies.VARIABLE) == "empty":
        asked["empty_at"] = max(skip // 2, 1)
    began = time.monotonic()
    failed: RankFailed | HangError | None = None
    try:
        status = run_quietly(
            script,
            arguments,
            module,
            strategy,
            cards,
            precision,
            nccl,
            hang_timeout,
            lambda run: _recording(run, asked),
        )
    except (RankFailed, HangError) as error:
        failed, status = error, max(getattr(error, "exit_code", 1), 1)
    found = [Profile.of(json.loads(path.read_text())) for path in sorted(folder.glob("profile*.json"))]
    result = merged(found) if found else None
    if result is not None and failed is None:
        options = {"--strategy": strategy, "--cards": cards, "--precision": precision, "--nccl": nccl}
        options |= {"--steps": str(steps), "--skip": str(skip), "--hang-timeout": hang_timeout}
        words = [*_words(options), *(["-m"] if module else []), script, *(arguments or ())]
        result = _with_remedies(result, words, time.monotonic() - began)
    if per_card and result is not None:
        result = _with_cards_of_their_own(result, folder / "per-card")
    if as_json:
        print_json({"script": script, "status": status, **(result.as_dict() if result else {"cards": []})})
    elif failed is None and result is not None and result.cards:
        console = Console()
        if not console.is_terminal:
            console.width = max(console.width, _WIDTH_OF_A_FILE)
        _render(console, result)
    if failed is not None:
        raise failed
    if status == 0 and (result is None or not result.cards):
        least = f"a profile needs more than {skip + 1}"
        say(f"{script} made too few steps: {least}. Fix: give --skip 0, or let it run longer.")
        return 1
    return status


def _words(options: Mapping[str, str | None]) -> list[str]:
    """Options as they stand on a command line, those that were given."""
    return [word for name, value in options.items() if value is not None for word in (name, value)]


def _with_cards_of_their_own(result: Profile, folder: Path) -> Profile:
    """`result` with a trace a GPU besides."""
    written = [str(path) for trace in result.traces for path in split_by_card(Path(trace), folder)]
    if not written:
        say("--per-card: the traces hold nothing of GPUs, and stay as they are")
    return replace(result, traces=(*result.traces, *written))


def _with_remedies(result: Profile, words: list[str], took: float) -> Profile:
    """`result` with what is to be said of fragmented memory, once remedies were tried."""
    reserves = [Reserve(**row) for row in result.reserves]
    if remedies.is_trial() or not any(reserve.is_fragmented for reserve in reserves):
        return result
    worst = max(reserves, key=lambda reserve: reserve.fragments)
    why_not = remedies.why_not_tried(reserves)
    if why_not:
        return with_fragments(result, why_not=why_not)
    say(f"memory of {worst.card} is fragmented: trying remedies, in runs of the same steps")
    return with_fragments(result, remedies.try_remedies(words, worst.card, 60 + 3 * took))


@contextlib.contextmanager
def _recording(run: RunRequest, asked: dict[str, Any]) -> Iterator[None]:
    """Records what runs inside. Begun after planning, whose trials are not to be recorded."""
    # Kineto writes about its own start otherwise.
    with _variables({VARIABLE: json.dumps(asked), "KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "99")}):
        if not run.has_ranks:
            cards = choose_cards(run.cards or "all").cards
            # A script without `Parallel` is spread in `dp` alone.
            used = cards if run.strategy in (None, "dp") else cards[:1]
            begin_from_environment(None, [card.name for card in used])
        try:
            yield
        finally:
            end_from_environment()


def _settings(steps: int, skip: int, out: str | None) -> ProfileSettings:
    try:
        return ProfileSettings(steps, skip, out)
    except SettingError as error:
        raise SettingError(f"--{error.setting}", int(error.value), error.problem.partition(": ")[2]) from error


@contextlib.contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _render(console: Console, result: Profile) -> None:
    shown = [name for name in PARTS if any(getattr(card, name) >= 5e-4 for card in result.cards)]
    title = f"Milliseconds a step, over {result.steps} steps"
    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD)
    table.add_column("card")
    for name in ("step", *shown):
        table.add_column(name, justify="right")
    for card in result.cards:
        table.add_row(card.card, *(f"{getattr(card, name):.2f}" for name in ("step", *shown)))
    console.print(table)
    if result.cards[0].simulated:
        console.print("The cards are simulated and take turns on one CPU: idle is the others' turns.", highlight=False)
    rows: list[Any] = result.opportunities
    if not rows:
        console.print("Nothing holds these steps back that is looked for.")
    for row in result.memory:
        console.print(f"memory of {escape(row['text'])}", highlight=False)
    grid = Table.grid(padding=(0, 1))
    for number, each in enumerate(rows, start=1):
        grid.add_row(f"[bold yellow]{number}[/]", f"{escape(each.finding.cause)}: up to {each.gain:.2f}x")
        grid.add_row("", f"seen  {escape(each.finding.evidence)}")
        grid.add_row("", f"fix   {escape(each.finding.fix)}", end_section=True)
    for kept in result.growth:
        grid.add_row("[bold yellow]![/]", escape(kept.cause))
        grid.add_row("", f"seen  {escape(kept.evidence)}")
        grid.add_row("", f"fix   {escape(kept.fix)}", end_section=True)
    console.print(grid)
    for trace in result.traces:
        words = f"trace, for https://ui.perfetto.dev: {escape(trace)}"
        console.print(words, highlight=False, soft_wrap=True)
