"""``manycard doctor``: what is in this machine, what is wrong with it, and the fix.

Behaviour:
    * Tables (machine, cards, links, all-reduce) and the findings in words on standard output; with ``--json`` one
      document with the keys machine, cards, links and findings, and nothing else there.
    * ``--cards`` says which cards a run would use; findings about cards are about those, and those are measured, in a
      process of its own whose every stage has a time limit. Where CUDA itself hangs, that is found before this process
      asks it anything. Cards that others use are not measured, which is said.
      ``--quick`` reads only, and takes no memory on a card.
    * ``--deep`` also compares NCCL's settings, in fresh processes, prints the best as ``export`` lines and saves it
      for this machine. Where that can't be done, the reason stands in its place.
    * ``--select`` prints one line, ``CUDA_VISIBLE_DEVICES=...``, for the cards that ``--cards`` (by default the free
      ones) means, and nothing else on standard output; what is left out is said on standard error.
    * A machine without GPUs is no error: its cards are simulated.
    * Exit status: 0 well, also with warnings and notes; 1 a finding is an error (training on these cards can't
      start, fails or goes wrong); 2 wrong usage, such as cards that aren't there.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from manycard.cards import read_machine
from manycard.cards.nccl_settings import NcclMachine, NcclSettings, save_settings
from manycard.cli.options import CardsOption, JsonOption, print_json, say
from manycard.diagnosis import Facts, Measured, diagnose, read_facts
from manycard.diagnosis.document import describe, describe_sweep
from manycard.diagnosis.measuring import cuda_hangs_at, measure
from manycard.diagnosis.selecting import select
from manycard.diagnosis.tuning import TrialFailed, candidates_for, sizes_for, sweep, trial_runner
from manycard.errors import SettingError
from manycard.report.doctor import print_doctor

__all__ = ["doctor"]

_QuickOption = Annotated[
    bool, typer.Option("--quick", help="Read only: measure nothing, and take no memory on a card.")
]
_DeepOption = Annotated[
    bool,
    typer.Option(
        "--deep",
        help="Also compare NCCL settings on these cards (5 to 10 minutes), and save the best for this machine.",
    ),
]
_SelectOption = Annotated[
    bool, typer.Option("--select", help="Print CUDA_VISIBLE_DEVICES=... for the chosen cards (the free ones), only.")
]


def doctor(
    cards: CardsOption = None,
    *,
    quick: _QuickOption = False,
    deep: _DeepOption = False,
    choose_only: _SelectOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show what is in this machine, what is wrong with it, and the fix.

    \b
    Examples:
      manycard doctor
      manycard doctor --quick --json
      manycard doctor --deep --cards 0,1,2,3
      export $(manycard doctor --select --cards auto:2)
    """
    if quick and deep:
        raise SettingError("--quick", "with --deep", "one measures nothing, the other everything", fix="take one")
    if choose_only and deep:
        raise SettingError("--select", "with --deep", "it prints one line, and compares nothing", fix="take one")
    if choose_only:
        _select("auto" if cards is None else cards, as_json)
        return
    spec = "all" if cards is None else cards
    facts = read_facts(spec) if quick else _read_and_measure(spec)
    findings = diagnose(facts)
    document = describe(facts, findings, _sweep(facts) if deep else None)
    if as_json:
        print_json(document)
    else:
        print_doctor(Console(), document)
    if any(finding.severity == "error" for finding in findings):
        raise typer.Exit(1)


def _select(spec: str, as_json: bool) -> None:
    selection = select(spec)
    say(selection.said)
    if as_json:
        print_json(
            {"CUDA_VISIBLE_DEVICES": selection.value, "cards": list(selection.names), "left_out": selection.left_out}
        )
    else:
        print(f"CUDA_VISIBLE_DEVICES={selection.value}")


def _read_and_measure(spec: str) -> Facts:
    """Read and measure; where CUDA itself hangs, without it."""
    stuck = cuda_hangs_at(os.environ) if read_machine().cards else ""
    if stuck:
        return replace(read_facts(spec, cuda=False), measured=Measured(hung_at=stuck))
    facts = read_facts(spec)
    if not facts.chosen:
        return replace(facts, measured=measure(facts))
    console = Console(stderr=True)
    with console.status("measuring") as status:
        return replace(facts, measured=measure(facts, lambda stage: status.update(f"measuring: {stage}")))


def _sweep(facts: Facts) -> dict[str, Any]:
    """Compare NCCL settings and save the best; or why that can't be done."""
    if len(facts.chosen) < 2:
        return {"left_out": f"that takes two GPUs, and {facts.choice.summary()} would be used"}
    if facts.measured.left_out:
        return {"left_out": facts.measured.left_out}
    if facts.measured.hung_at or facts.measured.failed_at:
        return {"left_out": "NCCL doesn't work on these cards (see the findings)"}
    machine = NcclMachine.of(facts.choice.cards)
    sizes = sizes_for(facts)
    bar = Progress(
        TextColumn("comparing NCCL settings"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
    )
    with bar:
        task = bar.add_task("")

        def show(settings: Mapping[str, str], done: int, total: int) -> None:
            words = " ".join(f"{name}={value}" for name, value in settings.items()) or "default"
            bar.update(task, completed=done, total=total, description=words)

        try:
            found = sweep(trial_runner(facts, sizes), candidates_for(facts), show)
        except TrialFailed as failed:
            return {"left_out": f"NCCL's default fails: {failed}"}
    best = NcclSettings(
        dict(found.best.settings) if found.best else {},
        (found.best.gain or 1.0) if found.best else 1.0,
        sizes,
        datetime.date.today().isoformat(),
    )
    if machine is None:
        return describe_sweep(found, "", "NCCL's version is not known")
    try:
        return describe_sweep(found, str(save_settings(machine, best)))
    except OSError as failure:
        return describe_sweep(found, "", str(failure))
