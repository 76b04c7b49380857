"""Trials of a built-in workload for a plan, in a process of their own: ``python -m manycard.benchmark.trial FOLDER``.

Behaviour:
    * FOLDER holds ``trial.json``, a `TrialSpec`. The process writes lines of what it is trying to ``progress`` and
      leaves ``result.json``: facts, or what one candidate's trial found. A failure is a result with ``error``.
    * A candidate with ranks starts them; they run this same module, and rank 0 writes the result.
    * `run_trial` starts the process and waits; an interrupt ends it with all that it started.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manycard.benchmark.failures import describe_exit, describe_failure
from manycard.benchmark.results import write_json
from manycard.benchmark.workloads import find_workload
from manycard.benchmark.workloads.synthetic import SyntheticWorkload
from manycard.cards import Card, choose_cards
from manycard.data import Feed
from manycard.engine.batches.sizes import shard_sizes
from manycard.errors import SettingError
from manycard.launch import end_family, launch_script
from manycard.planner import Candidate, Measured
from manycard.precision import make_precision
from manycard.strategies import StrategyOptions, make_strategy
from manycard.strategies.train_step import TrainStep, TrainStepSettings
from manycard.trials.confirm import Timing, run_candidate, time_steps
from manycard.trials.gather import gather_facts
from manycard.trials.subject import Subject

__all__ = ["TrialSpec", "make_subject", "plannable", "run_trial"]

PATIENCE = 600.0
"""Seconds without any word of a trial after which it is ended: compiling takes minutes, a broken link for ever."""
_SETTINGS = ("MANYCARD_STRATEGY", "MANYCARD_CARDS", "MANYCARD_PRECISION")


@dataclass(frozen=True)
class TrialSpec:
    """What a trial's process is to do."""

    workload: str
    cards: str
    """As ``--cards`` takes it."""
    batch: int
    """The global batch."""
    precision: str = "default"
    small: bool = False
    compile: bool = False
    """For facts: whether to measure compiled steps too."""
    candidate: Mapping[str, Any] | None = None
    """The fields of a `Candidate`; None for facts."""
    seconds: float = 1.5
    """As `Timing.seconds`."""


def plannable(name: str) -> type[SyntheticWorkload]:
    """The workload called `name`, whose batches are drawn.

    Raises:
        SettingError: there is none, or it has real data.
    """
    kind = find_workload(name)
    if not issubclass(kind, SyntheticWorkload):
        raise SettingError(
            "--workload", name, "it is measured in epochs of real data", fix="plan one with drawn batches, such as mlp"
        )
    return kind


def make_subject(spec: TrialSpec, *, on_meta: bool = False) -> Subject:
    """The workload as something to try.

    Args:
        on_meta: without values, for a count alone: a model of any size takes no memory.

    Raises:
        SettingError: the workload isn't one of drawn batches.
    """
    kind = plannable(spec.workload)
    kind.check_available()
    workload = kind(small=spec.small)
    torch.manual_seed(0)
    with torch.device("meta" if on_meta else "cpu"):
        module: nn.Module = workload.make_model()
    optimizer = workload.make_optimizer(module)
    # A count needs shapes alone: one sample stands for them all.
    batch = workload.draw(1 if on_meta else spec.batch, torch.Generator().manual_seed(0))
    return Subject(kind.name, module, (optimizer,), workload.loss, batch, spec.precision, written="workload")


def run_trial(spec: TrialSpec, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Run a trial in a process of its own and return its result: ``facts``, or the fields of `Measured`.

    Args:
        say: told what is being tried.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
    with tempfile.TemporaryDirectory(prefix="manycard-plan-") as name:
        folder = Path(name)
        (folder / "trial.json").write_text(json.dumps(asdict(spec)), encoding="utf-8")
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "manycard.benchmark.trial", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
            code = _wait_for(process, folder / "progress", say)
        if code is None:
            return {"error": f"nothing came of it in {PATIENCE:.0f} s: a link may hang, which manycard doctor looks at"}
        result = folder / "result.json"
        if result.exists():
            found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
            return found
        return {"error": describe_exit(code, (folder / "log").read_text(encoding="utf-8", errors="replace")[-20_000:])}


def _wait_for(process: subprocess.Popen[bytes], progress: Path, say: Callable[[str], None]) -> int | None:
    """Its exit status; None where it had to be ended."""
    said, last = 0, time.monotonic()
    try:
        while True:
            code = process.poll()
            lines = progress.read_text(encoding="utf-8").splitlines() if progress.exists() else []
            for line in lines[said:]:
                say(line)
                last = time.monotonic()
            said = len(lines)
            if code is None and time.monotonic() - last > PATIENCE:
                end_family(process)
                return None
            if code is not None:
                return code
            time.sleep(0.1)
    except BaseException:
        end_family(process)
        raise


def main(folder: Path) -> int:
    """Run the trial in `folder`."""
    spec = TrialSpec(**json.loads((folder / "trial.json").read_text(encoding="utf-8")))
    cards = choose_cards(spec.cards).cards
    make_precision(spec.precision).apply_flags()
    try:
        found = _facts(spec, cards, folder) if spec.candidate is None else _candidate(spec, cards, folder)
    except Exception as error:
        if "RANK" in os.environ:
            raise  # whoever started the ranks says it
        found = {"error": describe_failure(error)}
    if found is not None:
        write_json(folder / "result.json", found)
    return 0


def _facts(spec: TrialSpec, cards: tuple[Card, ...], folder: Path) -> dict[str, Any]:
    with (folder / "progress").open("a", encoding="utf-8") as progress:
        facts = gather_facts(
            make_subject(spec),
            cards,
            timing=Timing(spec.seconds),
            compile_too=spec.compile,
            say=lambda line: print(line, file=progress, flush=True),
        )
    return {"facts": facts.to_document(), "error": ""}


def _candidate(spec: TrialSpec, cards: tuple[Card, ...], folder: Path) -> dict[str, Any] | None:
    assert spec.candidate is not None, "main looked"
    candidate = Candidate(**{**spec.candidate, "weights": tuple(spec.candidate["weights"])})
    if not candidate.ranks:
        return asdict(run_candidate(make_subject(spec), candidate, cards, Timing(spec.seconds)))
    if "RANK" not in os.environ:
        launch_script(["-m", "manycard.benchmark.trial", str(folder)], cards)
        return None
    return _in_a_rank(spec, candidate, cards)


def _in_a_rank(spec: TrialSpec, candidate: Candidate, cards: tuple[Card, ...]) -> dict[str, Any] | None:
    """Time this rank's steps; rank 0 returns the slowest rank's time and the fullest card's memory."""
    options = StrategyOptions(compile={} if candidate.compile else None)
    strategy = make_strategy(candidate.strategy, cards, make_precision(spec.precision), Feed(), options)
    peers, subject = strategy.peers, make_subject(spec)
    model = strategy.setup_module(subject.module)
    for optimizer in subject.optimizers:
        strategy.setup_optimizer(model, optimizer)
    settings = TrainStepSettings(candidate.accumulate, check_loss=False, graphs="off")
    step = TrainStep(strategy, subject.loss_fn, model, subject.optimizers, None, settings)
    sizes = shard_sizes(spec.batch, peers.world_size)
    start = sum(sizes[: peers.rank])
    shard = tuple(part[start : start + sizes[peers.rank]].to(strategy.device) for part in subject.batch)
    parts = list(zip(*(part.chunk(candidate.accumulate) for part in shard), strict=True))
    own = cards[int(os.environ["LOCAL_RANK"])]
    timing = Timing(spec.seconds, steps=10, warm_up=5)
    found = time_steps(lambda: [step(part) for part in parts], [own], timing, graphs=False, together=peers.barrier)
    everyone: list[Measured] = peers.gather_objects(found)
    if peers.rank:
        return None
    peaks = [each.memory_mib for each in everyone if each.memory_mib is not None]
    slowest = max(each.step_ms or 0.0 for each in everyone)
    return asdict(replace(found, step_ms=slowest, memory_mib=max(peaks, default=None)))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
