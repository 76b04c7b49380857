"""Probe: may this process run near its cards?

On a machine of several NUMA nodes a card hangs on one of them. Copies and launches from cores of another node cross
the link between nodes.
"""

from __future__ import annotations

from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding

__all__ = ["probe"]


def probe(facts: Facts) -> list[Finding]:
    """Find cards none of whose near cores this process may run on."""
    nodes, cpus = facts.surroundings.nodes, facts.surroundings.cpus
    if len(nodes) < 2 or not cpus:
        return []
    far: dict[int, list[str]] = {}
    for name, health in facts.chosen_health:
        node = health.numa_node
        near = nodes.get(node, frozenset()) if node is not None else frozenset()
        if node is not None and near and not near & cpus:
            far.setdefault(node, []).append(name)
    if not far:
        return []
    own = sorted(node for node, cores in nodes.items() if cores & cpus)
    wanted = ",".join(map(str, sorted(far)))
    return [
        Finding(
            cause="this process may not run on the cores next to some of its cards",
            evidence="; ".join(f"{', '.join(names)} on NUMA node {node}" for node, names in sorted(far.items()))
            + f"; the process may use cores of node {', '.join(map(str, own))} only",
            fix=f"start it with numactl --cpunodebind={wanted} --membind={wanted}, choose cards of node "
            f"{', '.join(map(str, own))}, or lift the limit (taskset, docker --cpuset-cpus)",
            severity="warning",
        )
    ]
