"""``manycard bench``: measure strategies against each other on built-in workloads.

Behaviour:
    * Bars and notes go to standard error; the table goes to standard output, or with ``--json`` one JSON document
      and nothing else. Both, and an HTML page with plots, are also saved in a folder, after every row.
    * A row that fails is a row with its error. Exit status: 0 all rows worked, 1 a row failed, 2 wrong usage,
      130 interrupted; the rows done by then are printed and saved.
    * Without matplotlib and jinja2 there is no HTML page, which is said; everything else is as before.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from manycard.benchmark import WORKLOADS, MatrixSettings, run_matrix, write_json
from manycard.cards import choose_cards
from manycard.cli.options import CardsOption, JsonOption, PrecisionOption, print_json, say
from manycard.errors import MissingExtraError, SettingError
from manycard.report import BenchmarkProgress, print_benchmark, write_benchmark_page

__all__ = ["bench"]

_INTERRUPTED = 128 + signal.SIGINT


WorkloadOption = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        metavar="NAMES",
        help=f"What to train: {', '.join(WORKLOADS)}. Repeatable, or a comma list. Without it: digits.",
    ),
]
CountsOption = Annotated[
    str | None,
    typer.Option(
        "--counts", metavar="NUMBERS", help="How many of the cards to use, such as 1,2,4. Without it: all of them."
    ),
]
StrategiesOption = Annotated[
    str,
    typer.Option(
        "--strategies",
        metavar="NAMES",
        help="A comma list of single, torch_dp, dp, ddp and pipeline (a stage of the model on each card). single always"
        " runs on one card: speed-up is measured against it.",
    ),
]
BatchOption = Annotated[
    int | None, typer.Option("--batch", metavar="SAMPLES", help="The global batch, fixed: strong scaling.")
]
PerCardBatchOption = Annotated[
    int | None,
    typer.Option(
        "--per-card-batch",
        metavar="SAMPLES",
        help="The batch a card, fixed: weak scaling. The workload's own default where neither is given.",
    ),
]
StepsOption = Annotated[
    int | None,
    typer.Option("--steps", metavar="NUMBER", help="Timed steps, for workloads that are measured in steps."),
]
EpochsOption = Annotated[int | None, typer.Option("--epochs", metavar="NUMBER", help="Epochs, for digits.")]
RepeatsOption = Annotated[
    int, typer.Option("--repeats", metavar="NUMBER", help="Rounds over all rows; the table shows medians.")
]
SmallOption = Annotated[
    bool, typer.Option("--small", help="Small variants of the workloads, which a CPU trains in seconds.")
]
ChannelsLastOption = Annotated[
    bool | None,
    typer.Option(
        "--channels-last/--no-channels-last",
        help="Memory format of image workloads. Without it: channels-last.",
        show_default=False,
    ),
]
SeedOption = Annotated[
    int, typer.Option("--seed", metavar="NUMBER", help="Decides first weights and data, the same in every row.")
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FOLDER", help="Where bench.json and bench.html go. Without it: reports/bench-<time>."
    ),
]


def bench(
    context: typer.Context,
    *,
    workload: WorkloadOption = None,
    cards: CardsOption = None,
    counts: CountsOption = None,
    strategies: StrategiesOption = "single,torch_dp,dp,ddp",
    precision: PrecisionOption = None,
    batch: BatchOption = None,
    per_card_batch: PerCardBatchOption = None,
    steps: StepsOption = None,
    epochs: EpochsOption = None,
    repeats: RepeatsOption = 1,
    small: SmallOption = False,
    channels_last: ChannelsLastOption = None,
    seed: SeedOption = 0,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> int:
    """Measure strategies against each other: speed, memory and losses, as a table and plots.

    Every row runs in a process of its own, from the same first weights and on the same data.

    \b
    Examples:
      manycard bench --workload digits --batch 128
      manycard bench --workload resnet50,gpt2 --precision bf16 --counts 1,2,4 --repeats 3
      manycard bench --workload mlp --cards cpu:2 --small
    """
    if context.invoked_subcommand is not None:
        return 0
    choice = choose_cards(cards or "all")
    settings = MatrixSettings(
        workloads=_names(workload) if workload is not None else ("digits",),
        cards=choice.cards,
        strategies=_names([strategies]),
        counts=_numbers("--counts", counts),
        precision=precision or "default",
        batch=batch,
        per_card_batch=per_card_batch,
        steps=steps,
        epochs=epochs,
        repeats=repeats,
        seed=seed,
        small=small,
        channels_last=channels_last,
    )
    folder = _make_folder(out)
    say(choice.summary())
    say(choice.describe())
    with BenchmarkProgress(Console(stderr=True)) as bars, _termination_as_interrupt():
        document = run_matrix(settings, _SavingWatcher(bars, folder / "bench.json"))
    return _present(document, folder, as_json=as_json)


def _present(document: dict[str, Any], folder: Path, *, as_json: bool) -> int:
    """Print and save the results; the exit status."""
    write_json(folder / "bench.json", document)
    if as_json:
        print_json(document)
    else:
        print_benchmark(document, Console())
    _save_page(document, folder / "bench.html")
    say(f"results: {folder / 'bench.json'}")
    if document["interrupted"]:
        return _INTERRUPTED
    return 1 if any(row["error"] is not None for row in document["rows"]) else 0


class _SavingWatcher:
    """Draws bars and saves every row as it comes."""

    def __init__(self, bars: BenchmarkProgress, path: Path) -> None:
        self._bars = bars
        self._path = path
        self.started = bars.started
        self.progressed = bars.progressed

    def finished(self, row: dict[str, Any], document: dict[str, Any]) -> None:
        write_json(self._path, document)
        self._bars.finished(row)


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end the run as Ctrl-C does: rows kept, nothing left running."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _save_page(document: dict[str, Any], path: Path) -> None:
    if not document["rows"]:
        return
    try:
        write_benchmark_page(document, path)
    except MissingExtraError as missing:
        say(f"no HTML report: {missing}")
        return
    say(f"report: {path}")


def _make_folder(out: Path | None) -> Path:
    folder = out or Path("reports") / f"bench-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench.json").touch()
    except OSError as error:
        raise SettingError(
            "--out", str(folder), f"results can't be written there ({error.strerror})", fix="name another folder"
        ) from error
    return folder.resolve()


def _names(values: list[str]) -> tuple[str, ...]:
    """The names in comma lists."""
    return tuple(name.strip() for value in values for name in value.split(",") if name.strip())


def _numbers(option: str, value: str | None) -> tuple[int, ...]:
    """The whole numbers in a comma list; none where the option is not given."""
    if value is None:
        return ()
    try:
        return tuple(int(word) for word in _names([value]))
    except ValueError:
        raise SettingError(option, value, "it is no list of whole numbers", fix="write it like 1,2,4") from None
