"""A script's first steps, watched and measured: ``python -m manycard.script.planning_worker FOLDER``.

Behaviour:
    * FOLDER holds ``orders.json`` (`manycard.script.planning`). As soon as a training step is known, it is measured
      on copies, ``result.json`` is written, and the process ends at once, in the middle of the script.
    * A script that uses `Parallel.train_step` is known at its third call: loss, model, optimizers and batch. In
      another one the third training call of a module is taken, with a stand-in for its loss: the mean of the outputs.
    * Its loader's rate is how fast further batches come when nothing computes.
    * A script that ends first leaves no result.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from manycard.cards import Card, choose_cards
from manycard.engine.batches.batch import tensors_in
from manycard.errors import ManycardError
from manycard.launch import Script
from manycard.planner import Candidate, Measured
from manycard.script.calls import Interception
from manycard.script.planning import result_document
from manycard.strategies.train_step import TrainStep
from manycard.trials.confirm import Timing, run_candidate
from manycard.trials.deciding import decide
from manycard.trials.gather import gather_facts, stated_facts
from manycard.trials.subject import Subject

__all__ = ["main"]

_SEEN = 3
"""Steps after which a training is known: the first ones build what later ones use."""
_MOST_BATCHES = 24
_MOST_SECONDS = 5.0
_AHEAD = 8
"""Batches that workers may have read ahead; they don't tell how fast batches come."""


class _Watch:
    """Sees the script's steps, and measures when it knows one.

    Args:
        finish: called with the training; doesn't return.
    """

    def __init__(self, finish: Callable[[Subject], None], written: str | None, precision: str) -> None:
        self._finish = finish
        self._written = written
        self._precision = precision
        self._optimizers: dict[int, Optimizer] = {}
        self._updates = 0
        self._calls = 0
        self._known = False
        self._iterator: Any = None

    @contextlib.contextmanager
    def watching(self) -> Any:
        """Watch train steps, calls of modules, optimizers and loaders."""
        step_kind: Any = TrainStep
        loading: Any = torch.utils.data.dataloader._BaseDataLoaderIter
        original, load = step_kind.__call__, loading.__next__

        def load_next(iterator: Any) -> Any:
            self._iterator = iterator
            return load(iterator)

        step_kind.__call__ = lambda step, batch: self._train_step(original, step, batch)
        loading.__next__ = load_next
        hook = register_optimizer_step_pre_hook(self._note_update)
        try:
            with Interception(self._call):
                yield
        finally:
            hook.remove()
            loading.__next__ = load
            step_kind.__call__ = original

    def _note_update(self, optimizer: Optimizer, *_: Any) -> None:
        self._optimizers[id(optimizer)] = optimizer
        self._updates += 1

    def _train_step(self, original: Any, step: TrainStep, batch: Any) -> Any:
        if self._known:
            return original(step, batch)  # a trial's own
        self._calls += 1
        if self._calls < _SEEN:
            return original(step, batch)
        strategy = step._strategy
        subject = Subject(
            type(strategy.unwrap(step._model)).__name__,
            strategy.unwrap(step._model),
            tuple(step._optimizers),
            step._given_loss,
            batch,
            strategy.precision.name,
            step._settings.clip_norm,
            self._written or "api",
        )
        self._done(subject)
        return original(step, batch)

    def _call(self, module: nn.Module, args: Any, kwargs: Any, plain: Callable[..., Any]) -> Any:
        if self._known or self._calls or self._updates < _SEEN - 1 or not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        own = {id(p) for p in module.parameters()}
        held = [o for o in self._optimizers.values() if any(id(p) in own for g in o.param_groups for p in g["params"])]
        if not held or next(tensors_in((args, kwargs)), None) is None:
            return plain(*args, **kwargs)
        inner = module.module if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel) else module
        subject = Subject(
            type(inner).__name__,
            inner,
            tuple(o for o in held if all(id(p) in own for g in o.param_groups for p in g["params"])),
            _mean_of_outputs,
            (args, kwargs),
            self._precision,
            written=self._written or "loop",
        )
        self._done(subject)
        return plain(*args, **kwargs)

    def _done(self, subject: Subject) -> None:
        self._known = True
        rate = self._input_rate(subject.samples)
        self._finish(Subject(**{**vars(subject), "input_rate": rate}))

    def _input_rate(self, samples: int) -> float | None:
        """How many samples a second the newest loader gives when nothing else happens; None where it can't tell."""
        if self._iterator is None:
            return None
        loaded, times = 0, []
        start = time.perf_counter()
        while loaded < _MOST_BATCHES and time.perf_counter() - start < _MOST_SECONDS:
            begin = time.perf_counter()
            try:
                next(self._iterator)
            except StopIteration:
                break
            times.append(time.perf_counter() - begin)
            loaded += 1
        steady = times[_AHEAD:] or times[len(times) // 2 :]
        total = sum(steady)
        return len(steady) * samples / total if len(steady) > 1 and total > 0 else None


def _mean_of_outputs(model: Any, batch: Any) -> Any:
    """A loss that costs next to nothing and sends a gradient back into every output."""
    args, kwargs = batch
    floats = [tensor for tensor in tensors_in(_plain(model(*args, **kwargs))) if tensor.requires_grad]
    if not floats:
        raise ManycardError("no output of the module requires a gradient")
    return sum((tensor.float().mean() for tensor in floats[1:]), start=floats[0].float().mean())


def _plain(out: Any) -> Any:
    return out if not hasattr(out, "to_tuple") else out.to_tuple()


def _measure(subject: Subject, orders: dict[str, Any], cards: tuple[Card, ...], folder: Path) -> dict[str, Any]:
    if orders["cards_model"]:
        facts = stated_facts(
            subject,
            orders["cards_model"],
            machines=orders["nodes"],
            network_gb_per_s=orders["network"],
            batch=subject.samples,
        )
        return result_document(facts, {})
    with (folder / "progress").open("a", encoding="utf-8") as progress:

        def say(line: str) -> None:
            print(line, file=progress, flush=True)

        timing = Timing(0.3 if cards[0].simulated else 1.5)
        facts = gather_facts(subject, cards, timing=timing, compile_too=orders["compile"], say=say)
        measured: dict[Candidate, Measured] = {}

        def run(candidate: Candidate) -> Measured | None:
            # Ranks would run the whole script once more: they stay predicted.
            if candidate.ranks:
                return None
            measured[candidate] = run_candidate(subject, candidate, cards, timing)
            return measured[candidate]

        decide(facts, run, most=orders["trials"], say=say)
    return result_document(facts, measured)


def main(folder: Path) -> int:
    """Run the script that the orders in `folder` name."""
    orders = json.loads((folder / "orders.json").read_text(encoding="utf-8"))
    cards = choose_cards(orders["cards"]).cards

    def finish(subject: Subject) -> None:
        try:
            found = _measure(subject, orders, cards, folder)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        beside = folder / "result.new"
        beside.write_text(json.dumps(found), encoding="utf-8")
        beside.rename(folder / "result.json")
        sys.stdout.flush()
        sys.stderr.flush()
        # Not an exception, which the script might catch; it is done for, with all its threads.
        os._exit(0)

    script = Script.parse(orders["argv"])
    with _Watch(finish, orders["written"], orders["precision"] or "default").watching():
        if script.name == str(folder / "notebook.py"):
            sys.path.insert(1, orders["place"])
        script.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
