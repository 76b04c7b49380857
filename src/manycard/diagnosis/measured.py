"""What `manycard.diagnosis.measuring` found on the cards, as data that probes look at.

Cards are named as torch names them (``cuda:1``). What was not measured is missing or None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["AllReduce", "Copy", "HostCopy", "Load", "Measured", "Ranks"]


@dataclass(frozen=True)
class Copy:
    """Copies from one card to another."""

    source: str
    target: str
    gb_per_s: float
    """10^9 bytes a second, of the largest size."""
    latency_us: float
    """Microseconds of a copy of 4 bytes, queued and awaited."""
    wrong_bytes: int = 0
    """Bytes that arrived as others, over all patterns and sizes that were compared."""
    compared_bytes: int = 0
    peer: bool | None = None
    """Whether CUDA says that one can reach the other's memory directly."""


@dataclass(frozen=True)
class HostCopy:
    """Copies between the host's memory and a card, 10^9 bytes a second."""

    card: str
    to_card: float
    """From pinned memory."""
    from_card: float
    """To pinned memory."""
    pageable_to_card: float
    """From ordinary memory."""
    generation: int | None = None
    """PCIe generation of the link while it was busy."""
    width: int | None = None
    """PCIe lanes of the link while it was busy."""


@dataclass(frozen=True)
class AllReduce:
    """One NCCL all-reduce over all chosen cards."""

    size: int
    """Bytes on each card."""
    us: float
    """Microseconds, the median."""
    bus_gb_per_s: float
    """2 (n - 1) / n times the size over the time, which can be compared with a link's bandwidth."""
    right: bool = True
    """Whether every card had the true sum."""


@dataclass(frozen=True)
class Load:
    """A card while it multiplied matrices."""

    card: str
    reasons: tuple[str, ...] = ()
    """What held its clocks back, as in `manycard.cards.health.CLOCK_REASONS`."""
    sm_clock: int | None = None
    """MHz."""
    power: float | None = None
    """Watts."""
    temperature: int | None = None
    """Degrees Celsius."""
    teraflops: float | None = None
    """10^12 operations a second, in bf16."""


@dataclass(frozen=True)
class Ranks:
    """Processes, one a card, that have joined in a group."""

    count: int
    seconds: float
    """From their start to their end, the start of Python and torch included."""


@dataclass(frozen=True)
class Measured:
    """Everything that was measured."""

    copies: tuple[Copy, ...] = ()
    host_copies: tuple[HostCopy, ...] = ()
    all_reduces: tuple[AllReduce, ...] = ()
    loads: tuple[Load, ...] = ()
    ranks: tuple[Ranks, ...] = ()
    """At most one."""
    hung_at: str = ""
    """The stage that did not end in time, such as ``starting NCCL``; empty where all ended."""
    failed_at: str = ""
    """The stage that raised."""
    failure: str = ""
    """What it raised, in a line."""
    helped: str = ""
    """A variable with which the stage that hung or failed works, such as ``NCCL_P2P_DISABLE=1``."""
    left_out: str = ""
    """Why something was not measured, in words; empty where all was."""

    def copy(self, source: str, target: str) -> Copy | None:
        """Copies in one direction."""
        return next((copy for copy in self.copies if (copy.source, copy.target) == (source, target)), None)

    @classmethod
    def from_records(cls, records: Sequence[Mapping[str, Any]], **ended: str) -> Measured:
        """Put together what the measuring process wrote, a record a figure.

        Args:
            records: each with ``kind`` (copy, host, all_reduce, load or ranks) and its figures.
            ended: `hung_at` and the like.
        """
        kinds: dict[str, list[Any]] = {"copy": [], "host": [], "all_reduce": [], "load": [], "ranks": []}
        makers = {"copy": Copy, "host": HostCopy, "all_reduce": AllReduce, "load": Load, "ranks": Ranks}
        for record in records:
            values = {name: value for name, value in record.items() if name != "kind"}
            if "reasons" in values:
                values["reasons"] = tuple(values["reasons"])
            kinds[record["kind"]].append(makers[record["kind"]](**values))
        return cls(
            tuple(kinds["copy"]),
            tuple(kinds["host"]),
            tuple(kinds["all_reduce"]),
            tuple(kinds["load"]),
            tuple(kinds["ranks"]),
            **ended,
        )
