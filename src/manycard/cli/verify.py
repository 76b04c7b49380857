"""``manycard verify``: prove that many cards compute what one card computes.

Behaviour:
    * A table of the steps and the verdict in words go to standard output; with ``--json`` one document and nothing
      else there. What is being done goes to standard error.
    * Exit status: 0 the same training; 1 it differs, or the script failed (its traceback goes to standard error);
      2 wrong usage.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from manycard.cli.options import (
    ArgumentsArgument,
    CardsOption,
    JsonOption,
    ModuleOption,
    ScriptArgument,
    SyncBatchnormOption,
    print_json,
    say,
)
from manycard.launch import Script
from manycard.script.verify.comparing import Report
from manycard.script.verify.differences import Difference, Named, StepDifference
from manycard.script.verify.verifying import TORCHRUN, ScriptFailedError, VerifySettings
from manycard.script.verify.verifying import verify as run_and_compare
from manycard.strategies import STRATEGIES

__all__ = ["verify"]

_WIDTH_OF_A_FILE = 120
_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


_StrategyOption = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        metavar="STRATEGY",
        help="How the run on many cards spreads the work, instead of what the script says: "
        f"{', '.join(name for name in STRATEGIES if name != 'single')}, or {TORCHRUN} for a script with "
        "DistributedDataParallel (told by its source).",
        show_default=False,
    ),
]


def verify(
    script: ScriptArgument,
    arguments: ArgumentsArgument = None,
    *,
    module: ModuleOption = False,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Optimizer steps to compare.")] = 20,
    cards: CardsOption = None,
    strategy: _StrategyOption = None,
    sync_batchnorm: SyncBatchnormOption = False,
    as_json: JsonOption = False,
) -> int:
    """Prove that many cards compute what one card computes, or say where and why they don't.

    The script runs twice, on one card and on many, with the same seeds, for the first N optimizer steps. Samples,
    losses, gradients, learning rates and parameters are compared step by step. What the script prints is hidden;
    files that it writes are written.

    It may be a script for one card, which manycard spreads; one that uses manycard; or one for torchrun.

    \b
    Examples:
      manycard verify --cards cpu:2 train.py --epochs 1
      manycard verify --cards cpu:2 --steps 5 --sync-batchnorm train_resnet.py
      manycard verify --strategy ddp --cards 0,1 train.py
      manycard verify --strategy torchrun --cards cpu:2 train_ddp.py
    """
    settings = VerifySettings(Script(script, tuple(arguments or ()), module), steps, cards, strategy, sync_batchnorm)
    try:
        report = run_and_compare(settings, say)
    except ScriptFailedError as failed:
        print(failed.trace.rstrip(), file=sys.stderr)
        raise
    if as_json:
        print_json(_document(report))
    else:
        console = Console()
        if not console.is_terminal:
            console.width = max(console.width, _WIDTH_OF_A_FILE)
        _render(console, report)
    return 0 if report.same else 1


def _document(report: Report) -> dict[str, Any]:
    return {
        "same": report.same,
        "steps": len(report.steps),
        "cards": list(report.cards),
        "largest": {
            "loss": _number(report.loss),
            "gradient": {"parameter": report.gradient.name, "value": _number(report.gradient.value)},
            "parameter": {"parameter": report.parameter.name, "value": _number(report.parameter.value)},
        },
        "tolerances": asdict(report.tolerances),
        "estimated": report.sketched,
        "first_difference": None
        if report.first is None
        else asdict(report.first) | {"value": _number(report.first.value)},
        "causes": [asdict(cause) for cause in report.causes],
        "set_aside": list(report.set_aside),
        "not_checked": list(report.not_checked),
        "differences": [_step_document(step) for step in report.steps],
        "spread": list(report.spread),
    }


def _step_document(step: StepDifference) -> dict[str, Any]:
    one, many = step.losses
    return {
        "step": step.number,
        "losses": {"one": list(map(_number, one)), "many": list(map(_number, many))},
        "loss": _number(step.loss),
        "gradient": {"parameter": step.gradient.name, "value": _number(step.gradient.value)},
        "parameter": {"parameter": step.parameter.name, "value": _number(step.parameter.value)},
        "same_data": step.same_data,
        "same_learning_rates": step.same_rates,
        "backward_at": step.backward_at,
        "step_at": step.step_at,
    }


def _number(value: float) -> float | None:
    """A number that JSON has."""
    return value if math.isfinite(value) else None


def _render(console: Console, report: Report) -> None:
    console.print(_table(report))
    console.print(f"[bold {'green' if report.same else 'red'}]{escape(_verdict(report))}[/]", highlight=False)
    for line in _remarks(report):
        console.print(escape(line), highlight=False)
    if not report.causes:
        return
    console.print()
    table = Table.grid(padding=(0, 1))
    for cause in report.causes:
        table.add_row(f"[bold {_COLOURS[cause.severity]}]{cause.severity}[/]", escape(cause.cause))
        table.add_row("  seen", escape(cause.evidence))
        table.add_row("  fix", escape(cause.fix), end_section=True)
    console.print(table)


def _table(report: Report) -> Table:
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, collapse_padding=True)
    for heading in ("step", "loss, one card", f"{len(report.cards) or 'many'} cards", "differs by"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("gradient\ndiffers by", justify="right")
    table.add_column("most in")
    table.add_column("parameter\ndiffers by", justify="right")
    table.add_column("samples,\nlearning rate")
    first = report.first.step if report.first is not None else 0
    for step in report.steps:
        same = [name for name, is_same in (("samples", step.same_data), ("rate", step.same_rates)) if not is_same]
        table.add_row(
            str(step.number),
            *map(_losses, step.losses),
            _size(step.loss),
            _size(step.gradient.value),
            escape(step.gradient.name if step.gradient.value else ""),
            _size(step.parameter.value),
            f"{' and '.join(same)} differ" if same else "same",
            style="red" if step.number == first else None,
        )
    return table


def _losses(losses: Sequence[float]) -> str:
    shown = ", ".join(f"{loss:.6g}" for loss in losses[:2])
    return f"{shown}, ..." if len(losses) > 2 else shown


def _size(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _verdict(report: Report) -> str:
    cards = f"{len(report.cards)} cards ({', '.join(report.cards)})" if report.cards else "many cards"
    if report.first is None:
        count = len(report.steps)
        return f"The same training: {count} step{'' if count == 1 else 's'} on one card and on {cards} agree."
    return f"Not the same training on {cards}: {_in_words(report.first)}."


def _in_words(first: Difference) -> str:
    where = f" ({first.where})" if first.where else ""
    size = f" by {first.value:.2g}" if math.isfinite(first.value) else ""
    if first.what == "number of steps":
        return f"one of the runs ends before step {first.step}{where}"
    what = {
        "data": "what modules are given differs",
        "loss": f"the loss differs{size}",
        "gradient": f"the gradient of {first.name} differs{size} of the largest gradient",
        "learning rate": f"the learning rate differs{size}",
        "parameter": f"the update of {first.name} differs{size} of the largest parameter",
        "initial parameters": f"{first.name} differs{size} before the first update",
    }[first.what]
    return f"in step {first.step} {what}{where}"


def _remarks(report: Report) -> list[str]:
    tolerances, estimated = report.tolerances, ", estimated" if report.sketched else ""
    lines = [
        f"Largest differences: loss {_size(report.loss)} (at most {tolerances.loss:g}), "
        f"gradient {_named(report.gradient)} (at most {tolerances.gradient:g} of the largest{estimated}), "
        f"parameter {_named(report.parameter)} (at most {tolerances.parameter:g} of the largest{estimated})."
    ]
    if report.set_aside:
        shown = ", ".join(report.set_aside[:3]) + (", ..." if len(report.set_aside) > 3 else "")
        lines.append(f"Not compared where gradients are nothing but rounding: {shown}.")
    lines.extend(f"Not checked: {what}." for what in report.not_checked)
    return lines


def _named(named: Named) -> str:
    return f"{_size(named.value)} in {named.name}" if named.value else "0"
