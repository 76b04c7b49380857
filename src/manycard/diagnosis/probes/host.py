"""Probe: do the host's cores, threads and shared memory suffice for the chosen cards?"""

from __future__ import annotations

from manycard.cards import in_words
from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding

__all__ = ["probe"]

_LEAST_SHM = 1024**3
"""Bytes of /dev/shm below which loader workers and NCCL run out: docker gives 64 MiB unless it is told."""
_MOST_WORKERS = 8
"""Loader workers a rank that are worth counting with."""
_BATCHES_AHEAD = 2
"""What a worker of a DataLoader reads ahead unless it is told otherwise."""
_CORES_A_CARD = 2
"""A thread that drives the card, and one to load and copy."""


def probe(facts: Facts) -> list[Finding]:
    """Find threads that outnumber the cores, too few cores, and a small /dev/shm."""
    return [*_threads(facts), *_default_threads(facts), *_cores(facts), *_shm(facts)]


def _threads(facts: Facts) -> list[Finding]:
    """A rank takes OMP_NUM_THREADS threads; unset, the launcher gives each rank one."""
    written = facts.environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not written:
        return []
    if not written.isascii() or not written.isdecimal() or int(written) < 1:
        return [
            Finding(
                cause="OMP_NUM_THREADS holds no number of threads, so each library takes its own default",
                evidence=f"OMP_NUM_THREADS={facts.environment['OMP_NUM_THREADS']!r}",
                fix=f"set OMP_NUM_THREADS={max(facts.machine.host.cores // max(len(facts.choice.cards), 1), 1)}, or "
                "unset it",
                severity="warning",
            )
        ]
    ranks = max(len(facts.choice.cards), 1)
    threads, cores = int(written), facts.machine.host.cores
    if threads * ranks <= cores:
        return []
    return [
        Finding(
            cause="the threads of all ranks outnumber the cores, so they take turns",
            evidence=f"OMP_NUM_THREADS={threads}, {ranks} rank{'s'[: ranks > 1]} with one process a card: "
            f"{threads * ranks} threads on {cores} cores",
            fix=f"set OMP_NUM_THREADS={max(cores // ranks, 1)}, or leave it unset",
            severity="warning" if threads > 1 else "note",
        )
    ]


def _default_threads(facts: Facts) -> list[Finding]:
    """Torch counts the machine's cores, not what a container's quota gives."""
    threads, cores = facts.torch.threads, facts.machine.host.cores
    if "OMP_NUM_THREADS" in facts.environment or threads <= cores:
        return []
    return [
        Finding(
            cause="torch starts more threads than the cores this process may use, and they take turns",
            evidence=f"{threads} threads for each operator on the CPU, {cores} cores of "
            f"{facts.machine.host.cores_total} (affinity and the container's quota)",
            fix=f"set OMP_NUM_THREADS={cores}",
            severity="warning",
        )
    ]


def _cores(facts: Facts) -> list[Finding]:
    cards, host = len(facts.chosen), facts.machine.host
    if host.cores >= _CORES_A_CARD * cards:
        return []
    limited = f" (of the machine's {host.cores_total})" if host.cores < host.cores_total else ""
    return [
        Finding(
            cause="there are few cores for so many cards: loading data and launching kernels will hold them back",
            evidence=f"{host.cores} cores{limited} for {cards} cards",
            fix=f"give the job at least {_CORES_A_CARD} cores a card",
            severity="warning",
        )
    ]


def _shm(facts: Facts) -> list[Finding]:
    total, free = facts.machine.host.shm_total, facts.machine.host.shm_free
    if total is None or free is None or free >= _LEAST_SHM:
        return []
    cards = max(len(facts.choice.cards), 1)
    workers = min(max(facts.machine.host.cores // cards, 1), _MOST_WORKERS) * cards
    share = free / (workers * _BATCHES_AHEAD)
    return [
        Finding(
            cause="/dev/shm is small: loader workers hand batches over through it, and NCCL talks through it",
            evidence=f"{in_words(free)} of {in_words(total)} are free: {workers} loader workers that read "
            f"{_BATCHES_AHEAD} batches ahead have {in_words(int(share))} for each batch",
            fix="start the container with --ipc=host or --shm-size=8g; on a host, remount it larger",
            severity="warning",
        )
    ]
