"""``strategy="auto"``: the first train step is planned by measuring, on copies, before anything has been trained.

When it decides. `setup` has the model, `train_step` the loss, and only the first batch tells the size; so it is the
first call of the step. Until then the run is one of `dp` on all chosen cards, which a plan can narrow to fewer cards,
or to steps without CUDA graphs, without any trace in the model: no replica has been made yet.

Behaviour:
    * Nothing that the training computes depends on the plan, save what depends on the number of cards by nature
      (BatchNorm statistics of shards, dropout draws). Trials train copies; random states of the host and of all cards
      are put back.
    * A plan is kept (`manycard.planner.cache`) by cards, versions, model, optimizers and batch, and found again.
    * Ranks can't be started from here: where they would be faster, the line says so, with the command.
    * In a process that is a rank already, ``auto`` is `ddp`. Simulated cards are not measured; they get `dp`.
    * What can't be tried (a module that can't be copied) trains with `dp` on all cards, and the line says why.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from manycard.cards import Card
from manycard.engine.batches.batch import tensors_in
from manycard.planner import Candidate, CardFacts, Facts, Measured, ModelFacts, Plan, make_plan
from manycard.planner.cache import keep_plan, kept_plan, plan_key
from manycard.strategies import STRATEGIES, Strategy
from manycard.strategies.dp import DataParallelStrategy
from manycard.strategies.train_step import TrainStep
from manycard.trials.confirm import Timing, run_candidate
from manycard.trials.deciding import decide
from manycard.trials.gather import gather_facts
from manycard.trials.subject import Subject
from manycard.version import __version__

__all__ = ["PlannedStep", "first_strategy", "make_auto_plan"]

_choices: weakref.WeakKeyDictionary[Strategy, Candidate] = weakref.WeakKeyDictionary()
"""What each run's first step has chosen, for the steps of its other models."""
_TIMING = Timing(seconds=0.5, steps=10)
"""Somebody waits for the first step."""


def first_strategy(name: str) -> tuple[str, bool]:
    """The strategy that a run begins with, and whether its first step is to be planned."""
    if name != "auto":
        return name, False
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _say("strategy auto: ddp, since this process is a rank")
        return "ddp", False
    return "dp", True


class PlannedStep(TrainStep):
    """A train step whose first call makes the plan."""

    plan: Plan | None = None
    """The plan that was made; None before the first call, and where one was found in the cache."""
    _decided = False

    def _run(self, batch: Any) -> torch.Tensor:
        if not self._decided:
            self._decided = True
            self._decide(batch)
        return super()._run(batch)

    def _decide(self, batch: Any) -> None:
        strategy = self._strategy
        assert isinstance(strategy, DataParallelStrategy), "auto begins with dp"
        if strategy in _choices:  # by another model's step: all models of a run are on the same cards
            self._take(strategy, _choices[strategy])
            return
        subject = Subject(
            type(strategy.unwrap(self._model)).__name__,
            strategy.unwrap(self._model),
            tuple(self._optimizers),
            self._given_loss,
            batch,
            strategy.precision.name,
            self._settings.clip_norm,
        )
        key = _key(subject, strategy)
        kept = kept_plan(key)
        if kept is not None and _usable(kept, strategy.cards):
            choice, line = _candidate(kept["choice"]), f"{kept['line']} (planned before)"
        else:
            try:
                self.plan = make_auto_plan(subject, strategy.cards, say=_note_on_terminal)
            except Exception as error:  # whatever it is, the training itself goes on
                why = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
                _say(f"strategy auto: dp on all cards, unmeasured: {why}")
                return
            choice, line = self.plan.choice, self.plan.line + _better_elsewhere(self.plan)
            if not strategy.cards[0].simulated:
                keep_plan(key, {"choice": vars(choice), "line": line, **self.plan.to_document()})
        _say(f"strategy auto: {line}")
        _choices[strategy] = choice
        self._take(strategy, choice)

    def _take(self, strategy: DataParallelStrategy, choice: Candidate) -> None:
        """Narrow the run to what the plan chose, where one of dp can be narrowed to it."""
        if choice.strategy not in ("single", "dp"):
            return
        if choice.cards < len(strategy.cards):
            strategy.narrow(self._model, choice.cards)
        # Both were made for all cards.
        self._in_parts = self._make_parts()
        mode = self._settings.graphs
        if mode == "auto" and not choice.graphs and choice.strategy == "dp" and not strategy.cards[0].simulated:
            mode = "off"
        self._graphs = strategy.make_graphs(self._model, mode)


def make_auto_plan(subject: Subject, cards: Sequence[Card], say: Callable[[str], None] = lambda _: None) -> Plan:
    """Plan `subject` for this process: no ranks, by trials on copies.

    Raises:
        ManycardError: one step on one card doesn't work.
    """
    if cards[0].simulated:
        facts = Facts(
            tuple(CardFacts(card.model) for card in cards),
            ModelFacts(subject.name, 0.0, 0.0, 0.0),
            subject.samples,
            simulated=True,
            one_process=True,
            built=tuple(STRATEGIES),
        )
        return make_plan(facts)

    def run(candidate: Candidate) -> Measured | None:
        return None if candidate.ranks else run_candidate(subject, candidate, cards, _TIMING)

    facts = replace(gather_facts(subject, cards, timing=_TIMING, say=say), one_process=True)
    return decide(facts, run, say=say)


def _better_elsewhere(plan: Plan) -> str:
    """A word on what a run that has begun can't become: shares by speed, or ranks that are predicted to be faster."""
    if plan.strategy not in ("single", "dp"):
        return f"; this run goes on as dp on all cards: take Parallel({plan.strategy!r}, ...) for it"
    own = plan.chosen.step_ms
    for row in plan.predictions:
        ranks = row.candidate.strategy == "ddp" and row.step_ms is not None
        if ranks and own is not None and row.step_ms is not None and row.step_ms < 0.9 * own:
            return f"; ddp may take {row.step_ms:.2f} ms a step: manycard run --strategy ddp"
    return ""


def _key(subject: Subject, strategy: Strategy) -> str:
    shapes = [(name, str(p.dtype), tuple(p.shape), p.requires_grad) for name, p in subject.module.named_parameters()]
    parts = [type(part).__qualname__ for part in subject.module.modules()]
    loss: Any = getattr(subject.loss_fn, "__code__", None)
    return plan_key(
        {
            "cards": [(card.name, card.model, card.uuid) for card in strategy.cards],
            "versions": (__version__, torch.__version__, torch.version.cuda),
            "model": (parts, shapes),
            "optimizers": [type(optimizer).__qualname__ for optimizer in subject.optimizers],
            "loss": loss.co_code.hex() if loss is not None else repr(type(subject.loss_fn)),
            "batch": [(str(t.dtype), tuple(t.shape)) for t in tensors_in(subject.batch)],
            "precision": subject.precision,
            "options": repr(strategy.options),
        }
    )


def _usable(kept: dict[str, Any], cards: Sequence[Card]) -> bool:
    try:
        return 1 <= _candidate(kept["choice"]).cards <= len(cards) and isinstance(kept["line"], str)
    except (KeyError, TypeError):
        return False


def _candidate(fields: dict[str, Any]) -> Candidate:
    return Candidate(**{**fields, "weights": tuple(fields["weights"])})


def _say(line: str) -> None:
    print(f"manycard: {line}", file=sys.stderr)


def _note_on_terminal(line: str) -> None:
    """What is being tried, on a terminal only: a log gets one line about the plan."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line} ...", end="\r", file=sys.stderr, flush=True)
