"""``manycard bench data``: how fast images come from files here, by backend and workers, and which to use.

Behaviour:
    * The table and the advice go to standard output, or with ``--json`` one JSON document and nothing else.
    * ``--make N`` writes photographs to PATH and measures nothing.
    * Exit status: 0 done, 1 no backend could decode the images, 2 wrong usage.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from manycard.benchmark import MatrixSettings, run_matrix
from manycard.benchmark.data import ReadingSettings, make_photographs, measure_reading
from manycard.cards import Card, choose_cards
from manycard.cli.options import CardsOption, JsonOption, PrecisionOption, print_json, say
from manycard.errors import ManycardError, SettingError

__all__ = ["bench_data"]

PathArgument = Annotated[Path, typer.Argument(metavar="PATH", help="A folder of images, at any depth.")]
MakeOption = Annotated[
    int | None,
    typer.Option("--make", metavar="N", help="Write N photographs of 500 x 375 to PATH, to measure on; then end."),
]
KilobytesOption = Annotated[
    float, typer.Option("--kilobytes", metavar="SIZE", help="With --make: the mean size of a file; 110 is ImageNet's.")
]
SizeOption = Annotated[int, typer.Option("--size", metavar="PIXELS", help="Height and width that training sees.")]
BatchOption = Annotated[int, typer.Option("--batch", metavar="IMAGES", help="Images in a batch.")]
BackendsOption = Annotated[
    str | None,
    typer.Option("--backends", metavar="NAMES", help="A comma list. Without it: all that can work here."),
]
WorkersOption = Annotated[
    str | None,
    typer.Option("--workers", metavar="NUMBERS", help="A comma list. Without it: 1, 2, 4, ... up to the cores."),
]
NeedsOption = Annotated[
    float | None, typer.Option("--needs", metavar="IMAGES_PER_S", help="What the training uses, all cards together.")
]
WorkloadOption = Annotated[
    str | None,
    typer.Option("--workload", metavar="NAME", help="Measure what the training needs, such as resnet50's, first."),
]
RoundsOption = Annotated[int, typer.Option("--rounds", metavar="NUMBER", help="Rounds; the table shows medians.")]


def bench_data(
    path: PathArgument,
    *,
    make: MakeOption = None,
    kilobytes: KilobytesOption = 110.0,
    size: SizeOption = 224,
    batch: BatchOption = 256,
    backends: BackendsOption = None,
    workers: WorkersOption = None,
    needs: NeedsOption = None,
    workload: WorkloadOption = None,
    cards: CardsOption = None,
    precision: PrecisionOption = None,
    rounds: RoundsOption = 3,
    as_json: JsonOption = False,
) -> int:
    """Measure how fast images come from files: by backend, by workers, against what the training needs.

    \b
    Examples:
      manycard bench data --make 1000 photographs
      manycard bench data photographs --needs 3000
      manycard bench data /data/imagenet/train --workload resnet50 --precision bf16
    """
    if make is not None:
        return _make(path, make, kilobytes, as_json=as_json)
    if needs is not None and workload is not None:
        raise SettingError("--workload", workload, "--needs is given as well", fix="give one of them")
    chosen = choose_cards(cards or "all").cards
    settings = ReadingSettings(
        path,
        chosen,
        size=size,
        batch=batch,
        backends=_words(backends),
        workers=_numbers(workers),
        rounds=rounds,
        needed=needs if workload is None else _needed(workload, chosen, precision or "default"),
    )
    document = measure_reading(settings, say)
    if as_json:
        print_json(document)
    else:
        _print(document, Console())
    return 0 if document["use"] is not None else 1


def _make(path: Path, number: int, kilobytes: float, *, as_json: bool) -> int:
    if number < 1:
        raise SettingError("--make", number, "it must be at least 1")
    if kilobytes <= 0:
        raise SettingError("--kilobytes", kilobytes, "it must be above 0")
    made = make_photographs(path, number, kilobytes)
    if as_json:
        print_json(made)
    else:
        print(f"{made['images']:,} images of {made['mean_kilobytes']} KB on average in {made['folder']}")
    return 0


class _Silent:
    """Hears what a benchmark does, and keeps it."""

    def started(self, label: str, round_number: int, rounds: int) -> None:
        say(f"what the training needs: {label}")

    def progressed(self, done: int, total: int) -> None:
        pass

    def finished(self, row: dict[str, Any], document: dict[str, Any]) -> None:
        pass


def _needed(workload: str, cards: tuple[Card, ...], precision: str) -> float:
    """Images/s of the training without files, on all cards."""
    strategy = "dp" if len(cards) > 1 else "single"
    settings = MatrixSettings((workload,), cards, (strategy,), precision=precision)
    if not settings.kinds[0].has_images:
        raise SettingError("--workload", workload, "it does not train on images", fix="give resnet50")
    row = run_matrix(settings, _Silent())["rows"][0]
    if row["error"] is not None:
        raise ManycardError(f"--workload {workload} could not be measured ({row['error']})", fix="give --needs instead")
    return float(row["samples_per_s"])


def _print(document: dict[str, Any], console: Console) -> None:
    print(f"{document['images']:,} images of {document['mean_kilobytes']} KB on average, to {document['size']} pixels")
    table = Table(header_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("backend")
    for heading in ("workers", "images/s", *(["of what is needed"] if document["needed"] else [])):
        table.add_column(heading, justify="right")
    for row in document["rows"]:
        speed = row["images_per_s"]
        cells = [row["backend"], str(row["workers"]), "–" if speed is None else f"{speed:,.0f}"]
        if document["needed"]:
            cells.append("–" if speed is None else f"{speed / document['needed']:.0%}")
        table.add_row(*cells)
    console.print(table)
    for row in document["rows"]:
        if row["error"] is not None:
            console.print(Text(f"{row['backend']} with {row['workers']} workers: {row['error']}", style="red"))
    for name, lack in document["left_out"].items():
        print(f"{name} is left out: it needs {lack}.")
    print(f"{document['advice'][0].upper()}{document['advice'][1:]}.")


def _words(value: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (value or "").split(",") if word.strip())


def _numbers(value: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in _words(value))
    except ValueError:
        raise SettingError("--workers", value, "it is no list of whole numbers", fix="write it like 1,2,4") from None
