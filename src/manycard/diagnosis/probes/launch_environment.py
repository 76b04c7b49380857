"""Probe: does the environment pretend that a launcher has started this process?

RANK and WORLD_SIZE left over from another run (in a notebook's or a shell's environment) make a script wait for
ranks that don't exist. A launcher that starts more ranks than there are cards puts two on one card, which NCCL
refuses ("Duplicate GPU detected").
"""

from __future__ import annotations

from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding

__all__ = ["probe"]

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def probe(facts: Facts) -> list[Finding]:
    """Find leftovers of a launcher, and more ranks than cards."""
    return [*_left_over(facts), *_more_ranks_than_cards(facts)]


def _left_over(facts: Facts) -> list[Finding]:
    there = {name: facts.environment[name] for name in _NEEDED if name in facts.environment}
    world = there.get("WORLD_SIZE", "")
    by_a_launcher = "TORCHELASTIC_RUN_ID" in facts.environment or "SLURM_PROCID" in facts.environment
    if not world.isdecimal() or int(world) < 2 or by_a_launcher:
        return []
    missing = [name for name in _NEEDED if name not in there]
    return [
        Finding(
            cause="variables of a launcher are set here, so a script will wait for ranks that nobody has started",
            evidence=", ".join(f"{name}={value}" for name, value in there.items())
            + (f"; {', '.join(missing)} missing" if missing else ""),
            fix=f"unset {' '.join(there)}, and start with manycard run or torchrun",
            severity="warning",
        )
    ]


def _more_ranks_than_cards(facts: Facts) -> list[Finding]:
    local = facts.environment.get("LOCAL_WORLD_SIZE", "")
    cards = len(facts.visible.cards)
    if (
        not local.isdecimal()
        or not cards
        or int(local) <= cards
        or facts.environment.get("MANYCARD_CARDS", "")[:4] == "cpu:"
    ):
        return []
    return [
        Finding(
            cause="there are more ranks than cards, so two share one, which NCCL refuses (Duplicate GPU detected)",
            evidence=f"LOCAL_WORLD_SIZE={local}, and torch sees {cards} card{'s'[: cards > 1]}",
            fix=f"start at most {cards} ranks a machine (torchrun --nproc-per-node {cards}), or use manycard "
            "run, which starts one a card",
            severity="error",
        )
    ]
