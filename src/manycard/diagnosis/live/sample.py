"""One look at the cards and at the jobs on them, as plain data that can be written and read again.

None is what could not be read: never zero.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["CardSample", "JobSample", "ProcessOnCard", "RankSample", "Sample"]


@dataclass(frozen=True)
class ProcessOnCard:
    """A process that has memory on a card."""

    pid: int
    memory: int | None = None
    """Bytes."""
    user: str | None = None
    command: str | None = None


@dataclass(frozen=True)
class CardSample:
    """A card at one time."""

    name: str
    """``card 0``, by nvidia-smi's number."""
    model: str
    uuid: str = ""
    use: int | None = None
    """Percent of the last moment in which a kernel ran; one that waits for another card counts too."""
    memory_used: int | None = None
    """Bytes."""
    memory_total: int | None = None
    """Bytes."""
    power: float | None = None
    """Watts."""
    power_limit: float | None = None
    """Watts."""
    temperature: int | None = None
    """Degrees Celsius."""
    sm_clock: int | None = None
    """MHz."""
    reasons: tuple[str, ...] = ()
    """What holds the clocks back."""
    pcie_in: float | None = None
    """Bytes a second from the host to the card."""
    pcie_out: float | None = None
    nvlink_in: float | None = None
    """Bytes a second from other cards, since the last look."""
    nvlink_out: float | None = None
    processes: tuple[ProcessOnCard, ...] | None = None


@dataclass(frozen=True)
class RankSample:
    """One process of a job."""

    pid: int
    rank: int | None = None
    """Its local rank; None for what is no rank."""
    cpu: float | None = None
    """Percent of one core since the last look."""
    memory: int | None = None
    """Bytes of the host's memory."""


@dataclass(frozen=True)
class JobSample:
    """A run: a process with all that it started."""

    pid: int
    command: str
    cards: tuple[str, ...] = ()
    """The cards that its processes have memory on."""
    simulated: int | None = None
    """How many simulated cards it was told to use; None where that isn't known or it uses GPUs."""
    cpu: float | None = None
    """Percent of one core, all its processes together."""
    memory: int | None = None
    """Bytes of the host's memory, all together; what processes share counts in each."""
    processes: tuple[RankSample, ...] = ()


@dataclass(frozen=True)
class Sample:
    """The cards and the jobs at one time."""

    time: float
    """Seconds since 1970."""
    cards: tuple[CardSample, ...] = ()
    jobs: tuple[JobSample, ...] = ()
    cpu: float | None = None
    """Percent of all of the host's cores."""
    note: str = ""
    """Why there are no cards."""

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Sample:
        """Read what `to_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        document = json.loads(text)
        if not isinstance(document, dict) or not isinstance(document.get("time"), (int, float)):
            raise ValueError("no sample of manycard monitor")
        try:
            cards = tuple(_card(values) for values in document.get("cards", ()))
            jobs = tuple(_job(values) for values in document.get("jobs", ()))
            return cls(document["time"], cards, jobs, document.get("cpu"), document.get("note", ""))
        except (TypeError, KeyError, AttributeError) as wrong:
            raise ValueError("no sample of manycard monitor") from wrong


def _known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that `kind` has a field for: a newer manycard may have written more."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def _card(values: Mapping[str, Any]) -> CardSample:
    known = _known(CardSample, values)
    known["reasons"] = tuple(known.get("reasons") or ())
    if known.get("processes") is not None:
        known["processes"] = tuple(ProcessOnCard(**_known(ProcessOnCard, each)) for each in known["processes"])
    return CardSample(**known)


def _job(values: Mapping[str, Any]) -> JobSample:
    known = _known(JobSample, values)
    known["cards"] = tuple(known.get("cards") or ())
    known["processes"] = tuple(RankSample(**_known(RankSample, each)) for each in known.get("processes") or ())
    return JobSample(**known)
