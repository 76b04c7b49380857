"""What is wrong between cards: the probes about links, copies, reductions and what NCCL is told, without the others.

For a run that loses time between its cards, where what ``manycard doctor`` says of hosts and limits is no answer.
"""

from __future__ import annotations

from collections.abc import Callable

from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import SEVERITIES, Finding
from manycard.diagnosis.probes import copies, isolation, links, nccl_environment, nvlinks, pcie, reductions

__all__ = ["find_between_cards"]

_PROBES: tuple[Callable[[Facts], list[Finding]], ...] = (
    pcie.probe,
    nvlinks.probe,
    links.probe,
    copies.probe,
    reductions.probe,
    isolation.probe,
    nccl_environment.probe,
)


def find_between_cards(facts: Facts) -> list[Finding]:
    """Errors and warnings about what joins the cards, the gravest first; nothing where all is well.

    Args:
        facts: with measured copies and all-reduces, for what can't be read.
    """
    if len(facts.chosen) < 2:
        return []
    found = [finding for probe in _PROBES for finding in probe(facts) if finding.severity != "note"]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
