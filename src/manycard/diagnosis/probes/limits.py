"""Probe: do the limits of this process suffice for loader workers, locked memory and whole models in host memory?"""

from __future__ import annotations

from manycard.cards import in_words
from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding

__all__ = ["probe"]

_GIB = 1024**3
_BASE_FILES = 256
"""What Python, torch, NCCL and a script hold open by themselves."""
_FILES_A_WORKER = 2 * 8 + 16
"""Two batches read ahead, of up to 8 tensors each, and its queues: each tensor on its way is an open file."""
_MOST_WORKERS = 8
_LEAST_MEMORY = 4 * _GIB
_MEMORY_A_CARD = 2 * _GIB
"""CUDA's and torch's own share of the host's memory in each process, beside any data."""
_LEAST_LOCKED = 64 * 1024**2


def probe(facts: Facts) -> list[Finding]:
    """Find a low limit of open files or locked memory, little memory, and cores that save power."""
    return [*_files(facts), *_locked(facts), *_memory(facts), *_governor(facts)]


def _files(facts: Facts) -> list[Finding]:
    limit, most = facts.surroundings.open_files, facts.surroundings.open_files_most
    cards = max(len(facts.choice.cards), 1)
    workers = min(max(facts.machine.host.cores // cards, 1), _MOST_WORKERS) * cards
    needed = _BASE_FILES + workers * _FILES_A_WORKER
    if limit is None or limit >= needed:
        return []
    raised = needed if most is None else min(max(needed, 65536), most)
    return [
        Finding(
            cause="few files may be open at once: loaders fail with 'Too many open files', for each tensor from a "
            "worker is one",
            evidence=f"ulimit -n is {limit:,}; {workers} loader workers need about {needed:,}"
            + ("" if most is None or most >= needed else f", and {most:,} is the most this process may have"),
            fix=f"ulimit -n {raised}"
            + ("" if most is None or most >= needed else " and a higher hard limit (/etc/security/limits.conf, or ")
            + ("" if most is None or most >= needed else "docker run --ulimit nofile=65536)")
            + ', or torch.multiprocessing.set_sharing_strategy("file_system")',
            severity="warning",
        )
    ]


def _locked(facts: Facts) -> list[Finding]:
    locked = facts.surroundings.locked_memory
    if not facts.surroundings.infiniband or locked is None or locked >= _LEAST_LOCKED:
        return []
    return [
        Finding(
            cause="too little memory may be locked for InfiniBand, so NCCL can't use it between machines",
            evidence=f"ulimit -l is {in_words(locked)}; {', '.join(facts.surroundings.infiniband)} is there",
            fix="ulimit -l unlimited (docker run --ulimit memlock=-1)",
            severity="warning",
        )
    ]


def _memory(facts: Facts) -> list[Finding]:
    host, cards = facts.machine.host, len(facts.chosen)
    needed = _LEAST_MEMORY + _MEMORY_A_CARD * cards
    if not cards or host.memory_free >= needed:
        return []
    return [
        Finding(
            cause="the host has little free memory for so many cards: loading and checkpoints may be killed",
            evidence=f"{in_words(host.memory_free)} free of {in_words(host.memory_total)} (the container's limit "
            f"counts); {cards} cards need about {in_words(needed)} before any data",
            fix="give the job more memory, use fewer loader workers, or fewer cards",
            severity="warning",
        )
    ]


def _governor(facts: Facts) -> list[Finding]:
    if facts.surroundings.governor != "powersave" or not facts.chosen or facts.surroundings.virtual:
        return []
    return [
        Finding(
            cause="the host's cores save power, which delays the launching of kernels",
            evidence="scaling_governor is powersave",
            fix="sudo cpupower frequency-set -g performance (with intel_pstate powersave may be well; compare)",
            severity="note",
        )
    ]
