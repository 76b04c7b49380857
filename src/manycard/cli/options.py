"""What the commands share: options that mean the same everywhere, and how they talk.

* Standard output is for results, and with ``--json`` for one JSON document and nothing else.
* Everything that is said about the work goes to standard error, a line each, beginning with ``manycard:``.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from manycard.errors import SettingError
from manycard.hangs import hang_settings

__all__ = [
    "ArgumentsArgument",
    "CardsOption",
    "HangTimeoutOption",
    "JsonOption",
    "ModuleOption",
    "NcclOption",
    "PrecisionOption",
    "ScriptArgument",
    "SyncBatchnormOption",
    "check_hang_timeout",
    "print_json",
    "say",
]

ScriptArgument = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="A Python script; with -m, a module's name.", show_default=False)
]
"""SCRIPT."""

ArgumentsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS", help="What follows is the script's own.", show_default=False),
]
"""ARGS: what follows SCRIPT."""

ModuleOption = Annotated[bool, typer.Option("-m", help="Run SCRIPT as a module, as python -m does.")]
"""``-m``."""

SyncBatchnormOption = Annotated[
    bool, typer.Option("--sync-batchnorm", help="BatchNorm statistics over the whole batch, not each card's part.")
]
"""``--sync-batchnorm``."""

CardsOption = Annotated[
    str | None,
    typer.Option(
        "--cards",
        envvar="MANYCARD_CARDS",
        show_envvar=False,
        metavar="CARDS",
        help="Which cards to use: 'all', 'auto' (free ones), 'auto:N' (at most N of them), a count such as 2, a list "
        "such as 0,2 ('0,' is card 0 alone), or cpu:N for N cards simulated on the CPU.",
        show_default=False,
    ),
]
"""``--cards``; None where it was not given."""

PrecisionOption = Annotated[
    str | None,
    typer.Option(
        "--precision",
        envvar="MANYCARD_PRECISION",
        show_envvar=False,
        metavar="PRECISION",
        help="fp32, tf32, bf16, fp16, or default (what PyTorch's own flags say).",
        show_default=False,
    ),
]
"""``--precision``; None where it was not given."""

NcclOption = Annotated[
    str | None,
    typer.Option(
        "--nccl",
        envvar="MANYCARD_NCCL",
        show_envvar=False,
        metavar="SETTINGS",
        help="saved: apply the NCCL settings that doctor --deep saved for this machine (the default); default: none.",
        show_default=False,
    ),
]
"""``--nccl``; None where it was not given."""

HangTimeoutOption = Annotated[
    str | None,
    typer.Option(
        "--hang-timeout",
        metavar="SECONDS",
        help="End the run, saying who waits where, after so long without progress: seconds, auto (20 steps, at least "
        "300 s) or off.",
        show_default=False,
    ),
]
"""``--hang-timeout``; None where it was not given."""

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output, and nothing else there.")
]
"""``--json``."""


def check_hang_timeout(value: str) -> None:
    """Check ``--hang-timeout``.

    Raises:
        SettingError: it is no number of seconds, and neither of the words.
    """
    try:
        hang_settings(value)
    except SettingError as error:
        problem = error.problem.partition(": ")[2]
        raise SettingError("--hang-timeout", value, problem, fix="give seconds, such as 600, or auto or off") from error


def say(text: str) -> None:
    """Tell the user something about the work, on standard error."""
    for line in text.splitlines():
        print(f"manycard: {line}", file=sys.stderr, flush=True)


def print_json(document: dict[str, Any]) -> None:
    """Print the one JSON document of a command."""
    print(json.dumps(document, indent=2), flush=True)
