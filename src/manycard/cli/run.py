"""``manycard run``: run a script on the cards.

Behaviour:
    * A script that doesn't use manycard is spread by it (`manycard.script`): every outermost call of a module that it
      trains is cut over the cards and joined. A last line says what was spread. With ``--strategy single`` it runs on
      one card; a strategy that only a `Parallel` can follow is refused before anything is trained.
    * The script runs in this process, exactly as under ``python``, unless its strategy has one process a card: then
      ranks are started and it runs in each. A script that asks for such a strategy by itself is run in place until
      it says so (`NeedsRanks`); what it had done to this process is dropped by starting this command afresh, with
      the strategy and the cards that the script asked for.
    * ``--strategy``, ``--cards`` and ``--precision`` reach `Parallel` through the environment and win over the
      script's own; `Parallel` says so. MANYCARD_STRATEGY and its like may also be set instead of the options.
    * What can't work (no such script, strategy or card) is refused before anything starts: one line, status 2. That a
      script without `Parallel` can't have fp16 shows at its first call of a trained module, and is refused there.
    * A script that raises prints its own traceback and ends with status 1; ``sys.exit(3)`` ends with 3. In ranks,
      the first failure is the one that is printed.
    * With ``--json`` the script's own output goes to standard error, and the document follows at the end.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer

import manycard
from manycard.cards import Card, choose_cards
from manycard.cards.nccl_settings import apply_saved
from manycard.cli.options import (
    ArgumentsArgument,
    CardsOption,
    HangTimeoutOption,
    JsonOption,
    ModuleOption,
    NcclOption,
    PrecisionOption,
    ScriptArgument,
    SyncBatchnormOption,
    print_json,
    say,
)
from manycard.cli.run_request import RunRequest
from manycard.errors import HangError, NeedsRanks, RankFailed, SettingError
from manycard.launch import Script, cards_setting, exit_status, launch_script, own_traceback
from manycard.script import FedLoaders, Interception, ModuleReport, ScriptSpreading, SpreadSettings
from manycard.script.noticing import noticing
from manycard.script.planned_run import plan_run
from manycard.script.planning import ScriptPlanRequest
from manycard.script.precision import UnscaledPrecisionError, call_context, refuse_unscaled
from manycard.script.ranks.main import RankSettings
from manycard.script.strategies import UnfollowedError, spreading_for
from manycard.script.written_for_ranks import written_for_ranks
from manycard.strategies import STRATEGIES

__all__ = ["StrategyOption", "run", "run_quietly"]


@dataclass(frozen=True)
class _Outcome:
    """How a run ended."""

    status: int
    failed: RankFailed | HangError | None = None
    asks_for: tuple[str, str] | None = None
    """The strategy with ranks and the cards that the script asked for, in place; it is to be run in ranks."""
    spread: tuple[ModuleReport, ...] = ()
    """What became of the trained modules of a script that doesn't use manycard."""


StrategyOption = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        envvar="MANYCARD_STRATEGY",
        show_envvar=False,
        metavar="STRATEGY",
        help=f"How to spread the work, instead of what the script says: {', '.join(STRATEGIES)}, or auto, which plans.",
        show_default=False,
    ),
]
_CompileOption = Annotated[bool, typer.Option("--compile", help="Compile each card's module.")]
_ChannelsLastOption = Annotated[
    bool, typer.Option("--channels-last", help="Keep images and convolutions in channels-last memory format.")
]
_LoaderOption = Annotated[
    str | None,
    typer.Option(
        "--loader",
        metavar="auto",
        help="auto: give workers and read-ahead to DataLoaders that are made without.",
        show_default=False,
    ),
]
_GraphsOption = Annotated[
    bool, typer.Option("--graphs", help="Replay training calls as CUDA graphs where they can be recorded.")
]

_OutputsOption = Annotated[
    str,
    typer.Option(
        "--outputs",
        metavar="auto|spread|gathered",
        help="Which outputs stay on the cards that made them until something needs them whole: auto large ones (from "
        "32 MiB), spread all, gathered none.",
    ),
]


def run(
    script: ScriptArgument,
    arguments: ArgumentsArgument = None,
    *,
    module: ModuleOption = False,
    strategy: StrategyOption = None,
    cards: CardsOption = None,
    precision: PrecisionOption = None,
    sync_batchnorm: SyncBatchnormOption = False,
    compile_module: _CompileOption = False,
    channels_last: _ChannelsLastOption = False,
    loader: _LoaderOption = None,
    graphs: _GraphsOption = False,
    outputs: _OutputsOption = "auto",
    nccl: NcclOption = None,
    hang_timeout: HangTimeoutOption = None,
    as_json: JsonOption = False,
) -> int:
    """Run a script on all the cards: one that uses manycard, or one written for a single card.

    The script runs as it does under python: same arguments, same imports, same exit status. Options of manycard
    come before SCRIPT; everything after it belongs to the script.

    A script that doesn't use manycard runs once, and each call of a module that it trains is spread over the cards.
    The first calls are compared with one card; what can't be spread stays on one, and is said. --sync-batchnorm,
    --compile, --channels-last, --loader, --graphs and --outputs are for such scripts.

    \b
    Examples:
      manycard run train.py --epochs 3
      manycard run --cards cpu:2 plain_single_card_script.py
      manycard run --precision bf16 --channels-last train_resnet.py
      manycard run --outputs gathered train_with_a_loss_in_cpp.py
      manycard run --strategy ddp --cards 0,2 train.py
      manycard run --cards cpu:2 --precision fp32 -m project.train --lr 0.1
    """
    request = RunRequest(
        Script(script, tuple(arguments or ()), module),
        strategy,
        cards,
        precision,
        as_json,
        sync_batchnorm,
        compile_module,
        channels_last,
        loader,
        graphs,
        nccl,
        hang_timeout,
        outputs,
    )
    return _carry_out(request)


def run_quietly(
    script: str,
    arguments: Sequence[str] | None,
    module: bool,
    strategy: str | None,
    cards: str | None,
    precision: str | None,
    nccl: str | None,
    hang_timeout: str | None,
    begin: Callable[[RunRequest], contextlib.AbstractContextManager[None]],
) -> int:
    """Run a script as `run` does, with its output on standard error.

    Args:
        begin: called with what is to be run, after ``auto`` has been planned; the run is inside of what it returns.

    Returns:
        Its exit status.

    Raises:
        RankFailed, HangError: of a run in ranks.
    """
    words = Script(script, tuple(arguments or ()), module)
    request = RunRequest(words, strategy, cards, precision, as_json=True, nccl=nccl, hang_timeout=hang_timeout)
    if request.strategy == "auto":
        request = _planned(request)
    chosen = _choose(request.cards or "all", request) if request.cards or request.has_ranks else ()
    with _output_to_stderr(), begin(request):
        outcome = _in_ranks(request, chosen) if request.has_ranks else _in_place(request, chosen)
    if outcome.asks_for is not None:
        fix = f"give --strategy {outcome.asks_for[0]}"
        raise SettingError("SCRIPT", script, "it asks for one process per card", fix=fix)
    if outcome.failed is not None:
        raise outcome.failed
    return outcome.status


def _carry_out(request: RunRequest) -> int:
    start = time.monotonic()
    if request.strategy == "auto":
        request = _planned(request)
    folder, environment = os.getcwd(), dict(os.environ)
    chosen = _choose(request.cards or "all", request) if request.cards or request.has_ranks else ()
    with _output_to_stderr() if request.as_json else contextlib.nullcontext():
        outcome = _in_ranks(request, chosen) if request.has_ranks else _in_place(request, chosen)
    if outcome.asks_for is not None:
        os.chdir(folder)
        _start_afresh(request, *outcome.asks_for, environment)
    if request.as_json:
        print_json(_document(request, chosen, outcome, time.monotonic() - start))
    if outcome.failed is not None and not request.as_json:
        raise outcome.failed
    return outcome.status


def _planned(request: RunRequest) -> RunRequest:
    """The request with what a plan of its script says in place of ``auto``."""
    os.environ.pop("MANYCARD_STRATEGY", None)
    found = plan_run(ScriptPlanRequest(request.script, request.cards or "all", request.precision), say)
    planned = replace(request, strategy=None)
    if found.strategy in STRATEGIES and STRATEGIES[found.strategy].ranks:
        # Ranks have neither CUDA graphs of calls nor another loader than the script's.
        planned = replace(planned, graphs=False, loader=None)
    elif found.graphs and found.strategy == "dp":
        planned = replace(planned, graphs=True)
    return replace(planned, strategy=found.strategy, cards=found.cards or request.cards)


def _choose(spec: str, request: RunRequest) -> tuple[Card, ...]:
    choice = choose_cards(spec)
    say(choice.describe())
    if request.nccl != "default":
        apply_saved(choice.cards)  # ranks inherit it; a Parallel(nccl="default") takes it back
    return choice.cards


def _in_ranks(request: RunRequest, cards: Sequence[Card]) -> _Outcome:
    if written_for_ranks(request.script):
        return _started(request.script.argv, cards, request.environment())
    refuse_unscaled(request.precision, "--precision")
    with tempfile.TemporaryDirectory(prefix="manycard-") as folder:
        report = Path(folder) / "spread.json"
        settings = RankSettings(
            cards=tuple(map(str, cards)),
            seed=random.SystemRandom().randrange(2**32),
            own_card=all(card.uuid for card in cards),
            precision=request.precision,
            sync_batchnorm=request.sync_batchnorm,
            compile=request.compile,
            channels_last=request.channels_last,
            report=str(report),
        )
        # Sets have the same order in every rank only if strings have the same hashes.
        environment = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", str(settings.seed)), **request.environment()}
        words = ["-m", "manycard.script.ranks.main", settings.word, *request.script.argv]
        outcome = _started(words, cards, environment, own_card=settings.own_card)
        reports = json.loads(report.read_text()) if report.exists() else []
    return replace(outcome, spread=tuple(ModuleReport(**values) for values in reports))


def _started(
    words: Sequence[str], cards: Sequence[Card], environment: dict[str, str], *, own_card: bool = False
) -> _Outcome:
    try:
        launch_script(words, cards, environment, own_card=own_card)
    except HangError as hang:
        return _Outcome(1, hang)
    except RankFailed as failed:
        return _Outcome(failed.exit_code if failed.exit_code > 0 else 1, failed)
    return _Outcome(0)


def _in_place(request: RunRequest, cards: Sequence[Card]) -> _Outcome:
    os.environ.update(request.environment())
    if cards:
        os.environ["MANYCARD_CARDS"] = cards_setting(cards)
    spreading = spreading_for(request.strategy, request.script, _spread_settings(request, cards))
    with (
        Interception(spreading or ScriptSpreading(_spread_settings(request, cards))) as calls,
        noticing(manycard.Parallel, manycard.DataParallel, manycard.Pipeline, then=calls.stop) as made,
        FedLoaders(pin_memory=torch.cuda.is_available()) if request.loader else contextlib.nullcontext(),
    ):
        calls.active = spreading is not None
        _come_to(cards)
        try:
            request.script.run()
        except SystemExit as exit_request:
            status, text = exit_status(exit_request)
            print(text, end="", file=sys.stderr)
            if status != 0:
                return _Outcome(status)
        except (KeyboardInterrupt, UnscaledPrecisionError, UnfollowedError):
            raise
        except NeedsRanks:
            return _Outcome(0, asks_for=_asked_for(made[-1]) if made else ("ddp", "all"))
        except BaseException as error:
            error = error.with_traceback(own_traceback(error))
            sys.excepthook(type(error), error, error.__traceback__)
            return _Outcome(1)
    if made:
        return _Outcome(0)
    if spreading is None:
        say(f"nothing was spread: {request.script.name} makes no mc.Parallel that could follow {request.strategy}")
        return _Outcome(0)
    say(spreading.describe())
    return _Outcome(0, spread=tuple(spreading.reports))


def _come_to(cards: Sequence[Card]) -> None:
    """Make the first of the cards that were asked for the one that a script calls ``cuda``."""
    if cards and cards[0].device.index and not cards[0].simulated:
        torch.cuda.set_device(cards[0].device)


def _spread_settings(request: RunRequest, cards: Sequence[Card]) -> SpreadSettings:
    def choose() -> Sequence[Card]:
        if request.strategy == "single":
            return (cards or choose_cards("all").cards)[:1]
        return cards or _choose("all", request)

    return SpreadSettings(
        choose=choose,
        sync_batchnorm=request.sync_batchnorm,
        autocast=call_context(request.precision),
        compile=request.compile,
        channels_last=request.channels_last,
        graphs="auto" if request.graphs else "off",
        outputs=request.outputs,
    )


def _asked_for(made: inspect.BoundArguments) -> tuple[str, str]:
    """The strategy and the cards that a `Parallel` was made with, as the command line writes them."""
    cards = made.arguments["cards"]
    if not isinstance(cards, (str, int)):
        cards = ",".join(map(str, cards)) + ("," if len(cards) == 1 else "")
    return made.arguments["strategy"], str(cards)


@contextlib.contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Send everything written to standard output, by child processes too, to standard error."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def _start_afresh(request: RunRequest, strategy: str, cards: str, environment: dict[str, str]) -> NoReturn:
    """Replace this process by one that starts ranks: the script may hold memory of a card, threads, files."""
    say(f"{request.script.name} asks for one process per card (strategy {strategy}): starting ranks")
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    root = str(Path(manycard.__file__).resolve().parents[1])
    # '' is the working folder, where a file of the user's could stand in for a module.
    start = (
        f"import sys; sys.path[:] = [p for p in sys.path if p] + [{root!r}]; "
        "from manycard.cli import main; sys.exit(main())"
    )
    words = [sys.executable, "-c", start, *request.words(strategy, request.cards or cards)]
    os.execve(sys.executable, words, environment)


def _document(request: RunRequest, cards: Sequence[Card], outcome: _Outcome, seconds: float) -> dict[str, Any]:
    failed = outcome.failed
    return {
        "script": request.script.name,
        "strategy": request.strategy,
        "cards": [card.name for card in cards] or None,
        "ranks": len(cards) if request.has_ranks else None,
        "status": outcome.status,
        "seconds": round(seconds, 3),
        "spread": [asdict(report) for report in outcome.spread],
        "failed_rank": failed.rank if isinstance(failed, RankFailed) else None,
        "error": str(failed) if failed else None,
        "traceback": failed.trace if isinstance(failed, RankFailed) else failed.report if failed else None,
    }
