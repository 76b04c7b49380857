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

from manycard.benchmark import MatrixSettings, read_axes, run_matrix
from manycard.benchmark.ablation import AblationSettings
from manycard.benchmark.findings import add_links, faults_of_links
from manycard.cards import choose_cards
from manycard.cli import bench_options as options
from manycard.cli.bench_ablate import ablate_settings, refuse_with_ablate, refuse_without_ablate
from manycard.cli.bench_results import ResultFolder, termination_as_interrupt
from manycard.cli.options import CardsOption, JsonOption, ModuleOption, PrecisionOption, say
from manycard.errors import SettingError
from manycard.launch import Script, cards_setting
from manycard.report import BenchmarkProgress, benchmark_markdown, print_benchmark, write_benchmark_page

__all__ = ["bench"]

_STRATEGIES = "single,torch_dp,dp,ddp"


def bench(
    script: options.ScriptArgument = None,
    arguments: options.ArgumentsArgument = None,
    *,
    module: ModuleOption = False,
    workload: options.WorkloadOption = None,
    cards: CardsOption = None,
    counts: options.CountsOption = None,
    strategies: options.StrategiesOption = _STRATEGIES,
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
    target = _target(script, arguments, module)
    choice = choose_cards(cards or "all")
    if ablate:
        refuse_with_ablate(
            {
                "SCRIPT": script,
                "--counts": counts,
                "--strategies": strategies if strategies != _STRATEGIES else None,
                "--set": varied,
                "--precision": precision,
                "--epochs": epochs,
                "--channels-last": channels_last,
            }
        )
        taken_apart = AblationSettings(
            workload=names(workload)[0] if workload else "resnet50",
            cards=choice.cards,
            only=names([only]) if only is not None else (),
            batch=batch if batch is not None or per_card_batch is None else per_card_batch * len(choice.cards),
            files=files,
            steps=steps,
            repeats=repeats,
            seed=seed,
            small=small,
            time_limit=time_limit,
        )
        return ablate_settings(taken_apart, ResultFolder(out, against, resume=resume), as_json=as_json)
    refuse_without_ablate({"--only": only, "--files": files})
    settings = MatrixSettings(
        workloads=names(workload) if workload is not None else ("digits",) if target is None else (),
        cards=choice.cards,
        strategies=names([strategies]),
        counts=numbers("--counts", counts),
        precision=precision or "default",
        batch=batch,
        per_card_batch=per_card_batch,
        steps=steps,
        epochs=epochs,
        repeats=repeats,
        seed=seed,
        small=small,
        channels_last=channels_last,
        axes=read_axes(varied or (), script=target is not None),
        script=target,
        time_limit=time_limit,
    )
    folder = ResultFolder(out, against, resume=resume)
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


def _target(script: str | None, arguments: list[str] | None, module: bool) -> Script | None:
    if script is None:
        if module:
            raise SettingError("-m", True, "no module is named", fix="write: manycard bench -m MODULE")
        return None
    return Script(script, tuple(arguments or ()), module)


def names(values: list[str]) -> tuple[str, ...]:
    """The names in comma lists."""
    return tuple(name.strip() for value in values for name in value.split(",") if name.strip())


def numbers(option: str, value: str | None) -> tuple[int, ...]:
    """The whole numbers in a comma list; none where the option is not given."""
    if value is None:
        return ()
    try:
        return tuple(int(word) for word in names([value]))
    except ValueError:
        raise SettingError(option, value, "it is no list of whole numbers", fix="write it like 1,2,4") from None
