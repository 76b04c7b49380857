"""Probe: are the chosen cards equal?"""

from __future__ import annotations

from collections import Counter

from manycard.cards.prefer import model_of
from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding

__all__ = ["probe"]


def probe(facts: Facts) -> list[Finding]:
    """Find chosen cards of several models or sizes of memory."""
    models = Counter(model_of(info) for _, info in facts.chosen)
    if len(models) < 2:
        return []
    return [
        Finding(
            cause="the chosen cards are unequal: each gets an equal shard, so the slowest sets the pace and the "
            "smallest memory the batch",
            evidence=", ".join(f"{count} x {name} ({size} GiB)" for (name, size), count in sorted(models.items())),
            fix="use --cards auto, which takes equal ones",
            severity="warning",
        )
    ]
