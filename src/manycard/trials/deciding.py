"""From facts to a plan, with the few trials that can still change it.

Behaviour:
    * Candidates that could win are tried, the best predicted first, at most five of them; none on simulated cards, or
      where facts come from data sheets.
    * No trial begins when 60 seconds of trials have passed. Compiling isn't counted: what one card's measurement has
      compiled, later trials find in PyTorch's cache on disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from manycard.planner import Candidate, Facts, Measured, Plan, make_plan, worth_a_trial

__all__ = ["MOST_SECONDS", "MOST_TRIALS", "decide"]

MOST_TRIALS = 5
MOST_SECONDS = 60.0


def decide(
    facts: Facts,
    run: Callable[[Candidate], Measured | None],
    *,
    most: int = MOST_TRIALS,
    seconds: float = MOST_SECONDS,
    say: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Plan, try what could win, and plan again with what the trials found.

    Args:
        run: tries one candidate; None where it can't be tried from here, and stays predicted.
        most: trials at most.
        seconds: after so long no further trial begins.
        say: told what is being tried.
    """
    measured: dict[Candidate, Measured] = {}
    start, untried = time.monotonic(), worth_a_trial(facts, most=most)
    seen: set[Candidate] = set()
    while untried and len(measured) < most and time.monotonic() - start <= seconds:
        candidate = untried.pop(0)
        seen.add(candidate)
        say(f"trying {candidate.name} on {candidate.cards} card{'s' if candidate.cards > 1 else ''}")
        found = run(candidate)
        if found is not None:
            measured[candidate] = found
        # When those that promised most have disappointed, one that wasn't worth a trial may lead.
        if not untried and not (facts.simulated or facts.step.stated):
            leading = make_plan(facts, measured).choice
            untried = [leading] if leading not in seen and leading.strategy in facts.built else []
    return make_plan(facts, measured)
