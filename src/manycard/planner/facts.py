"""What a plan is made from: facts about a machine, a training and its script, and measurements.

Behaviour:
    * Plain frozen data, which goes to JSON and back (`Facts.to_document`, `Facts.from_document`), so that recorded
      measurements plan as fresh ones do, on any machine.
    * What could not be measured is None or an empty tuple, and `Facts.unmeasured` says why, a sentence each.
    * Sizes are MiB, times are milliseconds, rates are samples a second, speeds of links are 10^9 bytes a second in
      one direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from manycard.errors import SettingError

__all__ = ["WRITTEN", "CardFacts", "Facts", "LinkFacts", "ModelFacts", "StepFacts", "StepPoint"]

WRITTEN = ("workload", "api", "loop", "notebook", "ranks")
"""How a script may be written: a built-in workload, `Parallel`, an own loop, a notebook, torchrun's ranks."""


@dataclass(frozen=True)
class CardFacts:
    """One card."""

    model: str
    memory_mib: float | None = None
    """What training may take of its memory; None where that isn't known."""
    speed: float = 1.0
    """Its speed over the primary's, on the same work."""


@dataclass(frozen=True)
class LinkFacts:
    """How the cards of one machine are joined."""

    kind: str = "unknown"
    """``NVLink``, ``PCIe``, ``host`` or ``unknown``."""
    p2p: bool | None = None
    """Whether cards read each other's memory; None where nobody says."""
    copy_gb_per_s: float | None = None
    """A large copy from one card to another."""
    all_reduce: tuple[tuple[float, float], ...] = ()
    """``(MiB, ms)`` of all-reduces over `ranks` cards, by size."""
    ranks: int = 2
    """How many cards those all-reduces were over."""
    network_gb_per_s: float | None = None
    """Between two machines, for all their cards together."""
    stated: bool = False
    """Whether the figures come from data sheets and not from a trial."""


@dataclass(frozen=True)
class ModelFacts:
    """One model and its optimizer."""

    name: str
    parameters_mib: float
    gradients_mib: float
    """Of the parameters that train: what is reduced in each step."""
    state_mib: float
    """The optimizer's."""
    input_mib: float = 0.0
    """Of one sample."""
    output_mib: float = 0.0
    """What the module returns for one sample, in its own precision."""
    largest_part_mib: float = 0.0
    """Parameters of the largest block, which a sharded strategy gathers at once."""


@dataclass(frozen=True)
class StepPoint:
    """One card's step on so many samples."""

    samples: int
    ms: float | None
    """None where only memory is known."""
    peak_mib: float | None = None


@dataclass(frozen=True)
class StepFacts:
    """One card's steps, forward, backward and update, without any other card."""

    eager: tuple[StepPoint, ...] = ()
    graphed: tuple[StepPoint, ...] = ()
    """The same as CUDA graphs; empty where they were not tried or can't be recorded."""
    compiled: tuple[StepPoint, ...] = ()
    """Compiled, and as CUDA graphs."""
    host_ms: float | None = None
    """What the host needs to hand one eager step to an idle card: launches x cost of a launch."""
    launches: int | None = None
    """Operators that one step launches."""
    lock_share: float = 0.5
    """The part of `host_ms` for which Python's interpreter lock is held, so that cards driven by one process
    wait for each other."""
    stated: bool = False
    """Whether times are derived from data sheets."""
    no_graphs: str = ""
    """Why there are no graphs of this training."""

    @property
    def launch_us(self) -> float | None:
        """Host cost of a launch, in microseconds."""
        if self.host_ms is None or not self.launches:
            return None
        return 1e3 * self.host_ms / self.launches


@dataclass(frozen=True)
class Facts:
    """Everything a plan is made from."""

    cards: tuple[CardFacts, ...]
    """Those of one machine."""
    model: ModelFacts
    batch: int
    """The global batch."""
    step: StepFacts = field(default_factory=StepFacts)
    links: LinkFacts = field(default_factory=LinkFacts)
    machines: int = 1
    cores: int = 1
    """Of one machine's host."""
    written: str = "workload"
    """One of `WRITTEN`."""
    input_rate: float | None = None
    """Samples a second that the loader can give; None where it isn't known or holds nothing back."""
    simulated: bool = False
    """Whether the CPU plays the cards, so that speed says nothing."""
    one_process: bool = False
    """Whether whoever asks is a running process, which can't become ranks."""
    built: tuple[str, ...] = ("single", "dp", "torch_dp", "ddp")
    """Strategies that there are."""
    unmeasured: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.cards:
            raise SettingError("cards", (), "a plan needs at least one card", fix="name one, such as cpu:1")
        for setting, value in (("batch", self.batch), ("machines", self.machines)):
            if value < 1:
                raise SettingError(setting, value, "it must be at least 1", fix="give a whole number from 1 up")
        if self.written not in WRITTEN:
            raise SettingError("written", self.written, "no script is so", fix=f"give one of {', '.join(WRITTEN)}")

    @property
    def all_cards(self) -> int:
        """Cards of all machines."""
        return len(self.cards) * self.machines

    @property
    def stated(self) -> bool:
        """Whether something here is from a data sheet."""
        return self.step.stated or self.links.stated

    def to_document(self) -> dict[str, Any]:
        """The facts as JSON has them."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Facts:
        """The opposite of `to_document`."""
        values = dict(document)
        step = dict(values["step"])
        for kind in ("eager", "graphed", "compiled"):
            step[kind] = tuple(StepPoint(**point) for point in step[kind])
        links = dict(values["links"])
        links["all_reduce"] = tuple((float(size), float(ms)) for size, ms in links["all_reduce"])
        values |= {
            "cards": tuple(CardFacts(**card) for card in values["cards"]),
            "model": ModelFacts(**values["model"]),
            "step": StepFacts(**step),
            "links": LinkFacts(**links),
            "built": tuple(values["built"]),
            "unmeasured": tuple(values["unmeasured"]),
        }
        return cls(**values)
