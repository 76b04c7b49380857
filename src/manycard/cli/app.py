"""The command ``manycard``: its subcommands, and what every one of them does with an error.

Exit status: 0 done; 1 the work failed or a check found something; 2 wrong usage; 130 interrupted. ``manycard run``
ends with the script's own status.

    * An error of `manycard.errors` becomes one line on standard error. A setting that can't work is wrong usage.
    * `RankFailed` shows the rank's traceback first; the status is the rank's own where it has one.
    * Any other exception is a fault of manycard's, and leaves with its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import torch
import typer
from typer.core import TyperGroup

from manycard.cli.bench import bench
from manycard.cli.bench_data import bench_data
from manycard.cli.doctor import doctor
from manycard.cli.monitor import monitor
from manycard.cli.options import say
from manycard.cli.plan import plan
from manycard.cli.profile import profile
from manycard.cli.run import run
from manycard.cli.verify import verify
from manycard.errors import HangError, ManycardError, RankFailed, SettingError

__all__ = ["app", "main"]

INTERRUPTED = 130
"""128 + SIGINT, as a shell would say it."""


class _Commands(TyperGroup):
    """Commands, of which one has two words: ``bench data`` is no script of ``bench``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if " ".join(args[:2]) in self.commands:
            args = [" ".join(args[:2]), *args[2:]]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="manycard",
    cls=_Commands,
    help="One script, all the cards: train with PyTorch on every card of this machine.",
    epilog="Start with: manycard doctor, then manycard run train.py",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(doctor)
app.command()(monitor)
# Options that follow the script are the script's.
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command(context_settings={"allow_interspersed_args": False})(verify)
app.command(context_settings={"allow_interspersed_args": False})(plan)
app.command(context_settings={"allow_interspersed_args": False})(profile)
app.command()(bench)
app.command("bench data")(bench_data)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            own = version("manycard")
        except PackageNotFoundError:  # run from its source without having been installed
            own = "(not installed)"
        print(f"manycard {own}, torch {torch.__version__}, Python {sys.version.split()[0]}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        arguments: what follows ``manycard``; those of this process by default.
    """
    command = typer.main.get_command(app)
    try:
        # Not app(...), which would replace sys.excepthook, and not standalone, which would exit by itself.
        words = None if arguments is None else list(arguments)
        status: Any = command.main(args=words, prog_name="manycard", standalone_mode=False)
    except ManycardError as error:
        return _report(error)
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except Exception as error:
        if not _is_usage_error(error):
            raise
        return _report_usage(error)
    if status == INTERRUPTED:
        say("interrupted")
    return status if isinstance(status, int) else 0


def _report(error: ManycardError) -> int:
    if isinstance(error, HangError):
        say(error.report)
        say("ended the run")
        return 1
    if isinstance(error, RankFailed):
        if error.trace:
            print(f"rank {error.rank}:\n{error.trace.rstrip()}", file=sys.stderr)
        say(str(error))
        return error.exit_code if error.exit_code > 0 else 1
    say(str(error))
    return 2 if isinstance(error, SettingError) else 1


def _is_usage_error(error: Exception) -> bool:
    # typer may carry its own copy of click, so that click's own classes would match nothing.
    return any(kind.__name__ == "ClickException" for kind in type(error).__mro__)


def _report_usage(error: Any) -> int:
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "manycard"
    problem = error.format_message().rstrip(".")
    say(f"{problem}{'' if problem.endswith('?') else '.'} See: {where} --help")
    return 2
