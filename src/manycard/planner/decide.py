"""From facts and measurements to a plan.

Behaviour:
    * Every candidate gets a row, whether it can be used or not; those that can't say why.
    * Forks (`manycard.planner.forks`) strike candidates out, in order. Of those that are left the fastest wins;
      within 3 %, which is the noise of a good trial, the simplest does.
    * A measured time replaces a predicted one, and predictions that no trial has looked at are moved by as much as
      trials were off. A candidate whose trial failed is out, with the trial's words.
    * A strategy that this manycard doesn't have is predicted and never chosen while another is left.
    * `worth_a_trial` names the candidates that could still win.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from statistics import median

from manycard.planner.candidates import Candidate, candidates
from manycard.planner.facts import Facts
from manycard.planner.forks import FORKS, State, pace, simplest_of_the_fastest
from manycard.planner.memory import capacity_mib, in_parts_that_fit, memory_mib
from manycard.planner.plan import Measured, Plan, Prediction
from manycard.planner.step_time import step_parts

__all__ = ["make_plan", "worth_a_trial"]

_NO_SPEED = "simulated cards show what is computed, never how fast it would be"


def make_plan(facts: Facts, measured: Mapping[Candidate, Measured] | None = None) -> Plan:
    """Plan a training.

    Args:
        facts: what is known.
        measured: what trials of candidates found, by candidate as `worth_a_trial` named it.

    Example:
        >>> from manycard.planner import CardFacts, ModelFacts, StepFacts, StepPoint
        >>> step = StepFacts(eager=(StepPoint(8, 4.0, 900.0),), host_ms=1.0)
        >>> facts = Facts((CardFacts("NVIDIA H200", 140_000),), ModelFacts("net", 10, 10, 10), batch=8, step=step)
        >>> make_plan(facts).strategy
        'single'
    """
    state = _start(facts, measured or {})
    forks = []
    for look in FORKS:
        fork = look(state)
        if fork is not None:
            forks.append(fork)
        if state.settled:
            break
    choice = _choose(state)
    rows = [_explained(state, row, choice) for row in state.rows.values()]
    rows.sort(key=lambda row: (row.step_ms is None, row.step_ms or 0.0))
    chosen = next(row for row in rows if row.candidate == choice)
    reasons = (*state.reasons, _verdict(state, chosen, rows))
    return Plan(choice, reasons, tuple(rows), tuple(forks), facts, _notes(state, choice))


def worth_a_trial(facts: Facts, most: int = 5, within: float = 1.35) -> list[Candidate]:
    """The candidates whose predictions are near the best one's, the best first; none on simulated cards."""
    if facts.simulated or facts.step.stated:
        return []
    state = _start(facts, {})
    for look in FORKS:
        if look(state) is not None and state.settled:
            break
    left = [candidate for candidate in state.left if candidate.strategy in facts.built]
    known = sorted((c for c in left if state.rows[c].step_ms is not None), key=lambda c: pace(state.rows[c]))
    if not known:
        return left[:most]
    # The runner-up is always tried: a prediction has no second opinion otherwise.
    limit = within * pace(state.rows[known[0]])
    return [c for place, c in enumerate(known) if place < 2 or pace(state.rows[c]) <= limit][:most]


def _start(facts: Facts, measured: Mapping[Candidate, Measured]) -> State:
    """A row for every candidate, and those struck out that can't be used whatever the forks say."""
    state = State(facts)
    off = _off_by(facts, measured)
    for plain in candidates(facts):
        fitting = in_parts_that_fit(facts, plain)
        candidate = fitting or plain
        row = _predict(facts, candidate, measured.get(candidate), off)
        state.rows[candidate] = row
        found = measured.get(candidate)
        if found is not None and found.error:
            state.strike(candidate, f"its trial failed: {found.error}")
        elif fitting is None:
            room = capacity_mib(facts)
            state.too_large.append(candidate)
            state.strike(candidate, f"it needs {row.memory_mib:,.0f} MiB a card, and {room:,.0f} can be had")
    return state


def _off_by(facts: Facts, measured: Mapping[Candidate, Measured]) -> float:
    """How far trials were from their predictions, as a factor: what wasn't tried is taken to be off by as much."""
    ratios = []
    for candidate, found in measured.items():
        parts = step_parts(facts, candidate)
        if found.step_ms is not None and parts is not None and parts.step_ms > 0:
            ratios.append(found.step_ms / parts.step_ms)
    return median(ratios) if ratios else 1.0


def _predict(facts: Facts, candidate: Candidate, found: Measured | None, off: float) -> Prediction:
    parts = step_parts(facts, candidate)
    # One simulated card is the CPU itself, and can be timed; several share it.
    unknown = facts.simulated and candidate.cards > 1
    predicted = None if parts is None or unknown else parts.paced_ms
    memory = memory_mib(facts, candidate)
    found = found or _already_measured(facts, candidate)
    ms = found.step_ms if found is not None and found.step_ms is not None else predicted and off * predicted
    if ms is not None and parts is not None:
        ms = max(ms, parts.input_ms)
    return Prediction(
        candidate,
        step_ms=ms,
        samples_per_s=None if not ms else 1e3 * facts.batch / ms,
        memory_mib=found.memory_mib if found is not None and found.memory_mib is not None else memory,
        measured=found is not None and found.step_ms is not None,
        predicted_ms=predicted,
        predicted_mib=memory,
        parts={} if parts is None or unknown else asdict(parts),
    )


def _already_measured(facts: Facts, candidate: Candidate) -> Measured | None:
    """One card's step on the whole batch, where the facts hold just that."""
    if candidate.strategy != "single" or candidate.accumulate > 1 or facts.step.stated:
        return None
    points = [point for point in facts.step.eager if point.samples == facts.batch and point.ms is not None]
    return Measured(points[0].ms, points[0].peak_mib) if points else None


def _choose(state: State) -> Candidate:
    built = [candidate for candidate in state.left if candidate.strategy in state.facts.built]
    left = built or state.left
    if not left:  # nothing fits: name what comes nearest
        return min(state.rows, key=lambda c: (state.rows[c].memory_mib or 0.0, not c.ranks))
    return simplest_of_the_fastest(state, left)


def _explained(state: State, row: Prediction, choice: Candidate) -> Prediction:
    candidate = row.candidate
    if candidate == choice:
        return row
    best = state.rows[choice]
    why = state.struck.get(candidate, "")
    if candidate.strategy not in state.facts.built:
        own = f"this manycard has no strategy {candidate.strategy}; its figures are predicted"
        why = f"{own}; {why}" if why else own
    if not why and row.step_ms is None:
        why = _NO_SPEED if state.facts.simulated else "its speed can't be told from what is known"
    if not why and best.step_ms is not None and row.step_ms is not None:
        more = 100 * (row.step_ms / best.step_ms - 1)
        why = (
            f"a step takes {row.step_ms:.2f} ms, {more:.0f} % more"
            if more > 3
            else f"{row.step_ms:.2f} ms a step is within 3 % of the choice, which is simpler to run"
        )
    return Prediction(**{**vars(row), "why_not": why or "another is simpler"})


def _verdict(state: State, chosen: Prediction, rows: list[Prediction]) -> str:
    name = chosen.candidate.name
    if chosen.candidate in state.struck:
        return f"nothing that this manycard has can run it: {name} comes nearest, and {state.struck[chosen.candidate]}"
    if chosen.step_ms is None:
        return _NO_SPEED if state.facts.simulated else f"{name} is the only way left"
    others = [row for row in rows if row.candidate in state.left and row is not chosen and row.step_ms is not None]
    how = "measured" if chosen.measured else "predicted"
    if not others:
        return f"{chosen.step_ms:.2f} ms a step {how}"
    return f"{chosen.step_ms:.2f} ms a step {how}, next {others[0].candidate.name} with {others[0].step_ms:.2f}"


def _notes(state: State, choice: Candidate) -> tuple[str, ...]:
    facts, notes = state.facts, list(state.facts.unmeasured)
    if facts.step.stated:
        notes.append("Times are derived from data sheets, not measured: expect them to be off by a third.")
    elif facts.links.stated:
        notes.append("The links' figures are stated, not measured.")
    if facts.simulated:
        notes.append(f"Speeds of several cards are left out: {_NO_SPEED}.")
    if facts.step.no_graphs:
        notes.append(f"No CUDA graphs: {facts.step.no_graphs}.")
    missing = sorted({c.strategy for c in state.rows if c.strategy not in facts.built})
    if missing:
        notes.append(f"Predicted only, since this manycard doesn't have them: {', '.join(missing)}.")
    if choice.strategy not in facts.built:
        notes.append(f"The choice, {choice.strategy}, can't be run by this manycard.")
    return tuple(notes)
