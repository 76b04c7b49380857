"""``manycard plan``: measure briefly, and choose a strategy and its settings.

Behaviour:
    * A built-in workload is measured in processes of its own, one a trial. A script runs until its first steps in a
      process of its own, is measured there on copies, and ends.
    * ``--cards-model`` plans for cards that aren't here, from data sheets: nothing runs but a count.
    * Standard output has the tree and a table, or with ``--json`` one document. What is being tried goes to standard
      error. Exit status: 0 there is a plan; 1 the training couldn't be measured, or nothing that this manycard has can
      run it; 2 wrong usage.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from manycard.benchmark import WORKLOADS
from manycard.benchmark.trial import TrialSpec, make_subject, plannable, run_trial
from manycard.benchmark.workloads import find_workload
from manycard.cards import choose_cards
from manycard.cli.options import CardsOption, JsonOption, ModuleOption, PrecisionOption, print_json, say
from manycard.errors import ManycardError, MissingExtraError, SettingError
from manycard.launch import Script, cards_setting
from manycard.planner import WRITTEN, Candidate, Facts, Measured, Plan, make_plan
from manycard.planner.card_models import CARD_MODELS, parse_cards_model
from manycard.precision import make_precision
from manycard.report import print_plan, write_plan_page
from manycard.script.planning import ScriptPlanRequest, notebook_code, plan_script
from manycard.trials.deciding import MOST_TRIALS, decide
from manycard.trials.gather import stated_facts

__all__ = ["plan"]

_SECONDS = {True: 0.3, False: 1.5}
"""Timed seconds of a trial: of a small workload, and of others."""

_ScriptArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="SCRIPT", help="A training script; with -m, a module's name; or give --workload.", show_default=False
    ),
]
_ArgumentsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="What follows is the script's own.", show_default=False)
]
_WorkloadOption = Annotated[
    str | None,
    typer.Option(
        "--workload",
        metavar="NAME",
        help=f"Plan a built-in workload instead: {', '.join(name for name in WORKLOADS if name != 'digits')}.",
        show_default=False,
    ),
]
_BatchOption = Annotated[
    int | None,
    typer.Option(
        "--batch",
        metavar="SAMPLES",
        help="The global batch of a workload. Without it: its own a card.",
        show_default=False,
    ),
]
_CardsModelOption = Annotated[
    str | None,
    typer.Option(
        "--cards-model",
        metavar="CARDS",
        help='Plan for cards that aren\'t here, from data sheets, such as "8xH100 NVLink". Models: '
        f"{', '.join(model.name for model in CARD_MODELS)}.",
        show_default=False,
    ),
]
_NodesOption = Annotated[
    int, typer.Option("--nodes", metavar="NUMBER", help="With --cards-model: how many such machines.")
]
_NetworkOption = Annotated[
    float,
    typer.Option("--network", metavar="GB/S", help="With --nodes: 10^9 bytes/s from machine to machine."),
]
_TrialsOption = Annotated[
    int, typer.Option("--trials", metavar="NUMBER", help="Candidates to try at most; 0 predicts only.")
]
_CompileOption = Annotated[bool, typer.Option("--compile", help="Consider compiled steps too, which takes minutes.")]
_SmallOption = Annotated[bool, typer.Option("--small", help="The workload's small variant, for a CPU.")]
_ExplainOption = Annotated[bool, typer.Option("--explain", help="Also say why each other candidate lost.")]
_HtmlOption = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Also write the plan as a page.", show_default=False)
]
_WrittenOption = Annotated[
    str | None,
    typer.Option(
        "--written",
        metavar="HOW",
        help=f"How the training is written, if not as it looks: {', '.join(WRITTEN)}.",
        show_default=False,
    ),
]


def plan(
    script: _ScriptArgument = None,
    arguments: _ArgumentsArgument = None,
    *,
    module: ModuleOption = False,
    workload: _WorkloadOption = None,
    cards: CardsOption = None,
    precision: PrecisionOption = None,
    batch: _BatchOption = None,
    small: _SmallOption = False,
    compile_too: _CompileOption = False,
    trials: _TrialsOption = MOST_TRIALS,
    cards_model: _CardsModelOption = None,
    nodes: _NodesOption = 1,
    network: _NetworkOption = 50.0,
    written: _WrittenOption = None,
    explain: _ExplainOption = False,
    html: _HtmlOption = None,
    as_json: JsonOption = False,
) -> int:
    """Choose a strategy: measure briefly, predict every candidate, and try the best ones.

    Options of manycard come before SCRIPT. A script runs up to its first steps and is then ended; what it writes until
    then is written.

    \b
    Examples:
      manycard plan train.py --epochs 10
      manycard plan --workload resnet50 --precision bf16 --explain
      manycard plan --workload gpt2 --precision bf16 --cards-model "8xH100 NVLink" --nodes 4
      manycard plan --workload mlp --small --cards cpu:2 --json
    """
    target = None if script is None else Script(script, tuple(arguments or ()), module)
    _check(target, workload, batch, trials, nodes, network, written, cards_model, cards)
    make_precision(precision or "default")
    _check_page(html)
    with _telling(as_json=as_json) as tell:
        if workload is not None:
            spec = TrialSpec(
                workload, cards or "all", 1, precision or "default", small, compile_too, seconds=_SECONDS[small]
            )
            found = _of_workload(spec, batch, cards_model, nodes, network, written, trials, tell)
        else:
            assert target is not None, "_check looked"
            request = ScriptPlanRequest(target, cards or "all", precision, trials, compile_too, written)
            found = plan_script(request, cards_model, nodes, network, tell)
    return _present(found, explain=explain, html=html, as_json=as_json)


def _check(
    script: Script | None,
    workload: str | None,
    batch: int | None,
    trials: int,
    nodes: int,
    network: float,
    written: str | None,
    cards_model: str | None,
    cards: str | None,
) -> None:
    if (script is None) == (workload is None):
        given = "nothing" if script is None else f"{script.name} and --workload {workload}"
        raise SettingError("SCRIPT", given, "one training is to be planned", fix="give a script, or --workload NAME")
    if script is not None:
        if script.is_module or not script.name.endswith(".ipynb"):
            script.check()
        else:
            notebook_code(Path(script.name))
        if batch is not None:
            raise SettingError("--batch", batch, "a script has its own batch", fix="change it in the script")
    if workload is not None:
        plannable(workload).check_available()
    for option, value, least in (("--batch", batch, 1), ("--trials", trials, 0), ("--nodes", nodes, 1)):
        if value is not None and value < least:
            raise SettingError(option, value, f"it must be at least {least}", fix="give a larger whole number")
    if not network > 0:
        raise SettingError("--network", network, "it must be above 0", fix="give 50 for 400 Gbit/s")
    if nodes > 1 and cards_model is None:
        raise SettingError(
            "--nodes", nodes, "this machine alone can be measured", fix='say what they hold: --cards-model "8xH100"'
        )
    if cards_model is not None:
        parse_cards_model(cards_model)
        if cards is not None and cards != os.environ.get("MANYCARD_CARDS"):
            raise SettingError("--cards", cards, "--cards-model names the cards", fix="leave one of them out")
    if written is not None and written not in WRITTEN:
        raise SettingError("--written", written, "no script is so", fix=f"give one of {', '.join(WRITTEN)}")


def _check_page(html: Path | None) -> None:
    if html is None:
        return
    try:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.touch()
    except OSError as error:
        raise SettingError(
            "--html", str(html), f"it can't be written ({error.strerror})", fix="name another file"
        ) from error


def _of_workload(
    spec: TrialSpec,
    batch: int | None,
    cards_model: str | None,
    nodes: int,
    network: float,
    written: str | None,
    trials: int,
    tell: Callable[[str], None],
) -> Plan:
    own = find_workload(spec.workload)(small=spec.small).default_batch
    if cards_model is not None:
        count = len(parse_cards_model(cards_model)[0]) * nodes
        subject = make_subject(spec, on_meta=True)
        tell(f"counting {spec.workload}")
        facts = stated_facts(subject, cards_model, machines=nodes, network_gb_per_s=network, batch=batch or own * count)
        return make_plan(_as_written(facts, written))
    choice = choose_cards(spec.cards)
    say(choice.summary())
    spec = replace(spec, cards=cards_setting(choice.cards), batch=batch or own * len(choice.cards))
    found = run_trial(spec, tell)
    if found["error"]:
        raise ManycardError(f"{spec.workload} couldn't be measured: {found['error']}")
    facts = _as_written(Facts.from_document(found["facts"]), written)

    def run(candidate: Candidate) -> Measured:
        found = run_trial(replace(spec, candidate=asdict(candidate)))
        known = {key: found.get(key) for key in ("step_ms", "memory_mib")}
        return Measured(**known, error=found["error"])

    return decide(facts, run, most=trials, say=tell)


def _as_written(facts: Facts, written: str | None) -> Facts:
    return facts if written is None else replace(facts, written=written)


@contextmanager
def _telling(*, as_json: bool) -> Iterator[Callable[[str], None]]:
    """Says what is being tried: a line that moves on a terminal, lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield say
        return
    with console.status("measuring") as status:
        yield lambda line: status.update(line)


def _present(found: Plan, *, explain: bool, html: Path | None, as_json: bool) -> int:
    document: dict[str, Any] = found.to_document()
    if as_json:
        print_json(document)
    else:
        print_plan(document, Console(), explain=explain)
    if html is not None:
        try:
            write_plan_page(document, html)
            say(f"page: {html}")
        except MissingExtraError as missing:
            say(f"no HTML page: {missing}")
    return 0 if found.strategy in found.facts.built else 1
