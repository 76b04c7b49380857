"""The options of ``manycard bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manycard.benchmark import WORKLOADS
from manycard.benchmark.axes import AXES

ScriptArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="SCRIPT",
        help="A script that uses mc.Parallel, measured from inside in place of a built-in workload.",
        show_default=False,
    ),
]
ArgumentsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- ARGS", help="The script's own arguments, after --.", show_default=False),
]
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
        "--strategy",
        metavar="NAMES",
        help="A comma list of single, torch_dp, dp, manual, ddp and pipeline (a stage of the model on each card). "
        "single always runs on one card: speed-up is measured against it.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUES",
        help="A setting to vary, with a comma list of values; repeat it for every combination. "
        f"{', '.join(AXES)}, or an environment variable in capitals (NCCL_ALGO=Ring,Tree).",
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
    typer.Option(
        "--steps", metavar="NUMBER", help="Steady steps to time. Without it: a second of them, and at least 20."
    ),
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
TimeLimitOption = Annotated[
    float,
    typer.Option(
        "--time-limit", metavar="SECONDS", help="What one row may take; one that hangs is a row that says so."
    ),
]
AgainstOption = Annotated[
    Path | None,
    typer.Option(
        "--against",
        metavar="FILE",
        help="An earlier bench.json, or its folder: show what got slower or faster beyond noise. Exit status 1 if "
        "something got slower.",
    ),
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on with what the folder --out holds: rows that are done aren't run again.")
]
AblateOption = Annotated[
    bool,
    typer.Option(
        "--ablate", help="What each setting is worth, alone and together, from plain nn.DataParallel to manycard."
    ),
]
OnlyOption = Annotated[
    str | None,
    typer.Option("--only", metavar="NAMES", help="With --ablate: a comma list of its settings. Without it: all."),
]
FilesOption = Annotated[
    Path | None,
    typer.Option(
        "--files", metavar="FOLDER", help="With --ablate: train on the images below FOLDER, one folder a class."
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="FOLDER", help="Where the results go. Without it: reports/bench-<time>."),
]
