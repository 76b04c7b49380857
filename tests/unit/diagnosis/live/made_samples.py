"""Made-up samples of two cards at work."""

from __future__ import annotations

from dataclasses import replace

from manycard.diagnosis.live import CardSample, JobSample, ProcessOnCard, RankSample, Sample

GIB = 1024**3
CARD = CardSample(
    "card 0",
    "NVIDIA H200",
    "GPU-0",
    use=97,
    memory_used=40 * GIB,
    memory_total=141 * GIB,
    power=610.0,
    power_limit=700.0,
    temperature=58,
    sm_clock=1755,
    pcie_in=1.5e9,
    pcie_out=2e6,
    nvlink_in=120e9,
    nvlink_out=119e9,
    processes=(ProcessOnCard(4242, 39 * GIB, "someone", "python train.py"),),
)


def samples(count: int = 5, jobs: tuple[JobSample, ...] = (), **second: object) -> list[Sample]:
    """A few seconds of two cards, the second with these figures."""
    other = replace(CARD, name="card 1", uuid="GPU-1", **second)
    return [Sample(1_000_000.0 + second, (CARD, other), jobs, 12.0) for second in range(count)]


def ranks(*cpu: float) -> JobSample:
    """A run on simulated cards, a rank each with this use of a core."""
    processes = tuple(RankSample(100 + rank, rank, use, GIB) for rank, use in enumerate(cpu))
    return JobSample(99, "manycard run train.py", simulated=len(cpu), cpu=sum(cpu), memory=GIB, processes=processes)
