"""What is wrong with this machine, and the fix: one probe a file, each from `Facts` to a list of `Finding`.

A probe is pure. It looks at facts that were read once, raises nothing and prints nothing; a fact that couldn't be
read is no finding.
"""

from manycard.diagnosis.facts import Facts, TorchFacts, read_facts, read_torch
from manycard.diagnosis.finding import SEVERITIES, Finding, Severity
from manycard.diagnosis.measured import Measured
from manycard.diagnosis.probes import PROBES

__all__ = [
    "PROBES",
    "SEVERITIES",
    "Facts",
    "Finding",
    "Measured",
    "Severity",
    "TorchFacts",
    "diagnose",
    "read_facts",
    "read_torch",
]


def diagnose(facts: Facts) -> list[Finding]:
    """Run every probe.

    Returns:
        the findings, the gravest first.

    Example:
        >>> for finding in diagnose(read_facts("cpu:2")):
        ...     print(finding)
    """
    found = [finding for probe in PROBES for finding in probe(facts)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
