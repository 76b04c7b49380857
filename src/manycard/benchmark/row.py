"""What one row of a benchmark is to run: configuration that travels to the row's own process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from manycard.benchmark.axes import environment_of, written
from manycard.benchmark.measurement import Measurement
from manycard.benchmark.meter import Goal
from manycard.benchmark.workloads import Feeding, Workload, find_workload
from manycard.engine.batches.sizes import shard_sizes

__all__ = ["RowSpec", "row_label"]


def row_label(workload: str, strategy: str, cards: int, settings: dict[str, Any]) -> str:
    """How progress and messages call a row."""
    words = "".join(f", {name}={written(value)}" for name, value in settings.items())
    return f"{workload} {strategy} on {cards} {'card' if cards == 1 else 'cards'}{words}"


@dataclass(frozen=True)
class RowSpec:
    """One row, before it has run."""

    worker: ClassVar[str] = "manycard.benchmark.worker"
    """The module that runs it."""

    workload: str
    """A built-in workload's name, or a script's."""
    strategy: str
    cards: str
    """As ``--cards`` takes it: ``cpu:2``, or a list of GPUs such as ``0,1`` (``0,`` is GPU 0 alone)."""
    card_names: tuple[str, ...]
    simulated: bool
    scaling: str
    batch: int | None
    """Samples in the global batch; None where the script says it."""
    steps: int | None = None
    """Steady steps to time; None for as many as tell the speed."""
    epochs: int | None = None
    """Epochs, for workloads that are measured in epochs."""
    precision: str = "default"
    settings: tuple[tuple[str, Any], ...] = ()
    """What the row differs in from others with its strategy and cards."""
    seed: int = 0
    small: bool = False
    channels_last: bool = True
    script: tuple[str, ...] = ()
    """What ``python`` would be given; empty for a built-in workload."""

    @property
    def label(self) -> str:
        """How progress and messages call the row."""
        return row_label(self.workload, self.strategy, len(self.card_names), dict(self.settings))

    @property
    def environment(self) -> dict[str, str]:
        """The variables that its process and its ranks get."""
        variables = environment_of(self.settings)
        if self.script:  # a built-in workload is given its settings; a script's Parallel reads them
            variables |= {"MANYCARD_STRATEGY": self.strategy, "MANYCARD_CARDS": self.cards}
            precision = dict(self.settings).get("precision", self.precision)
            if precision != "default":
                variables["MANYCARD_PRECISION"] = str(precision)
        return variables

    @property
    def goal(self) -> Goal:
        """When it has run for long enough."""
        if self.epochs is not None:
            return Goal(1_000_000, patience=float("inf"))
        return Goal() if self.steps is None else Goal(self.steps, seconds=0.0)

    def make_workload(self) -> Workload:
        """The workload as this row wants it."""
        channels_last = bool(dict(self.settings).get("channels_last", self.channels_last))
        return find_workload(self.workload)(small=self.small, channels_last=channels_last)

    def feeding(self) -> Feeding:
        """How much data the row gets."""
        assert self.batch is not None, "only a script's batch may be unknown"
        return Feeding(batch=self.batch, length=self.epochs or 1, seed=self.seed)

    def measurement(self, **found: Any) -> Measurement:
        """A row of results with `found` in it."""
        batch = found.pop("batch", self.batch)
        return Measurement(
            workload=self.workload,
            unit="samples" if self.script else find_workload(self.workload).unit,
            strategy=self.strategy,
            cards=len(self.card_names),
            card_names=self.card_names,
            simulated=self.simulated,
            scaling=self.scaling,
            batch=batch,
            per_card_batch=None if batch is None else shard_sizes(batch, len(self.card_names))[0],
            precision=str(dict(self.settings).get("precision", self.precision)),
            settings=dict(self.settings),
            **found,
        )

    def to_json(self) -> str:
        """The row as text."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> RowSpec:
        """The opposite of `to_json`."""
        fields = json.loads(text)
        for name in ("card_names", "script"):
            fields[name] = tuple(fields[name])
        fields["settings"] = tuple((name, value) for name, value in fields["settings"])
        return cls(**fields)
