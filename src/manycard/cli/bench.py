"""``manycard bench``: measure strategies, card counts and settings against each other.

Behaviour:
    * It trains built-in workloads, or runs a script that uses `Parallel` and measures it from inside.
    * Bars and notes go to standard error; the table goes to standard output, or with ``--json`` one JSON document
      and nothing else. All of it is also saved in a folder (`bench_results`), whose path is said.
    * Rows of an efficiency under 0.9 end with what holds them back, from a few profiled steps after the timed ones.
    * A row that fails is a row with its error. Exit status: 0 all rows worked; 1 a row failed, or something got
      slower than in the run that ``--against`` names; 2 wrong usage; 130 interrupted: the rows done by then are printed
      and saved, and ``--resume`` goes on from there.
"""

from __future__ import annotations

import contextlib

from rich.console import Console

from manycard.benchmark import MatrixSettings, run_matrix
from manycard.benchmark.findings import add_links, faults_of_links
from manycard.cli import bench_options as options
from manycard.cli.bench_ablate import ablate_settings
from manycard.cli.bench_request import STRATEGIES, BenchRequest
from manycard.cli.bench_results import ResultFolder, termination_as_interrupt
from manycard.cli.options import CardsOption, JsonOption, ModuleOption, PrecisionOption, say
from manycard.launch import cards_setting
from manycard.report import BenchmarkProgress, benchmark_markdown, print_benchmark, write_benchmark_page

__all__ = ["bench"]


def bench(
    script: options.ScriptArgument = None,
    arguments: options.ArgumentsArgument = None,
    *,
    module: ModuleOption = False,
    workload: options.WorkloadOption = None,
    cards: CardsOption = None,
    counts: options.CountsOption = None,
    strategies: options.StrategiesOption = STRATEGIES,
    varied: options.SetOption = None,
    precision: PrecisionOption = None,
    batch: options.BatchOption = None,
    per_card_batch: options.PerCardBatchOption = None,
    steps: options.StepsOption = None,
    epochs: options.EpochsOption = None,
    repeats: options.RepeatsOption = 1,
    small: options.SmallOption = False,
    channels_last: options.ChannelsLastOption = None,
    seed: options.SeedOption = 0,
    time_limit: options.TimeLimitOption = 600.0,
    against: options.AgainstOption = None,
    ablate: options.AblateOption = False,
    only: options.OnlyOption = None,
    files: options.FilesOption = None,
    resume: options.ResumeOption = False,
    out: options.OutOption = None,
    as_json: JsonOption = False,
) -> int:
    """Measure strategies, card counts and settings against each other: speed, memory, energy and losses.

    Every row runs in a process of its own, from the same first weights and on the same data, in interleaved rounds.
    What holds rows of an efficiency under 90 % back is named, with its fix. Results are printed and saved as JSON, CSV,
    Markdown and HTML.

    \b
    Examples:
      manycard bench --workload digits --batch 128
      manycard bench --workload resnet50,gpt2 --counts 1,2,4 --set precision=bf16,fp32 --set graphs=on,off
      manycard bench train.py --strategy dp,ddp --counts 1,2 -- --lr 0.1
      manycard bench --workload mlp --cards cpu:2 --small --against reports/last/bench.json
      manycard bench --ablate --workload resnet50 --files /data/imagenet/train --out reports/ablation --resume
    """
    request = BenchRequest(**locals())
    choice = request.choose_cards()
    if request.ablate:
        return ablate_settings(request.ablation(choice), request.folder(), as_json=as_json)
    settings, folder = request.matrix(choice), request.folder()
    say(choice.summary())
    say(choice.describe())
    return _run(settings, folder, as_json=as_json)


def _run(settings: MatrixSettings, folder: ResultFolder, *, as_json: bool) -> int:
    journal = folder.journal(settings.cards)
    with BenchmarkProgress(Console(stderr=True)) as bars, termination_as_interrupt():
        document = run_matrix(settings, folder.watch(bars), journal)
        if not document["interrupted"]:
            cards = cards_setting(settings.cards)
            with contextlib.suppress(KeyboardInterrupt):  # the rows are there, and are shown
                add_links(document["rows"], lambda: faults_of_links(cards), say)
    return folder.present(
        document, as_json=as_json, show=print_benchmark, markdown=benchmark_markdown, write_page=write_benchmark_page
    )
