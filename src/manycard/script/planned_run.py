"""``manycard run --strategy auto``: plan a script once, then run it so, and the next time at once.

Behaviour:
    * A plan is kept by the script's text and arguments, the cards and the versions.
    * A script that can't be measured, or whose plan this manycard can't run, runs as without ``auto``, and the line
      says why. Nothing here ends a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from manycard.cards import choose_cards
from manycard.errors import CardsError, ManycardError
from manycard.launch import cards_setting
from manycard.planner.cache import keep_plan, kept_plan
from manycard.script.planning import ScriptPlanRequest, plan_script, script_key
from manycard.strategies import STRATEGIES

__all__ = ["PlannedRun", "plan_run"]


@dataclass(frozen=True)
class PlannedRun:
    """How to run a script."""

    strategy: str | None
    """None for the script's own."""
    cards: str | None
    """As ``--cards`` takes it; None for the script's own."""
    graphs: bool = False
    """Whether calls of an unmodified script are to be replayed as CUDA graphs."""


def plan_run(request: ScriptPlanRequest, say: Callable[[str], None]) -> PlannedRun:
    """How to run the script that `request` names; says it in one line.

    Raises:
        CardsError: the cards aren't there.
    """
    key = script_key(request)
    kept = kept_plan(key) if key is not None else None
    if kept is None or not {"run", "line"} <= set(kept):
        try:
            plan = plan_script(request)
        except CardsError:
            raise
        except ManycardError as error:
            say(f"strategy auto: not measured, so it runs as without: {str(error).splitlines()[0].rstrip('.:')}")
            return PlannedRun(None, None)
        run = {"strategy": plan.strategy, "cards": plan.choice.cards, "graphs": plan.choice.graphs}
        kept = {"run": run, "line": plan.line}
        if key is not None:
            keep_plan(key, {**plan.to_document(), **kept})
        line = plan.line
    else:
        line = f"{kept['line']} (planned before)"
    found = kept["run"]
    if found["strategy"] not in STRATEGIES:
        say(f"strategy auto: {found['strategy']} would be needed, which this manycard doesn't have; it runs as without")
        return PlannedRun(None, None)
    say(f"strategy auto: {line}")
    cards = choose_cards(request.cards).cards[: found["cards"]]
    return PlannedRun(found["strategy"], cards_setting(cards), bool(found["graphs"]))
