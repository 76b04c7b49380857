"""What one row of a benchmark is to run: configuration that travels to the row's own process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from manycard.benchmark.measurement import Measurement
from manycard.benchmark.workloads import Feeding, Workload, find_workload
from manycard.engine.sizes import shard_sizes

__all__ = ["RowSpec"]


@dataclass(frozen=True)
class RowSpec:
    """One row, before it has run."""

    workload: str
    strategy: str
    cards: str
    """As ``--cards`` takes it: ``cpu:2``, or a list of GPUs such as ``0,1`` (``0,`` is GPU 0 alone)."""
    card_names: tuple[str, ...]
    simulated: bool
    scaling: str
    batch: int
    """Samples in the global batch."""
    length: int
    """Steps after the warm-up, or epochs, as the workload counts."""
    precision: str = "default"
    seed: int = 0
    small: bool = False
    channels_last: bool = True

    @property
    def label(self) -> str:
        """How progress and messages call the row."""
        cards = len(self.card_names)
        return f"{self.workload} {self.strategy} on {cards} {'card' if cards == 1 else 'cards'}"

    def make_workload(self) -> Workload:
        """The workload as this row wants it."""
        return find_workload(self.workload)(small=self.small, channels_last=self.channels_last)

    def feeding(self) -> Feeding:
        """How much data the row gets."""
        return Feeding(batch=self.batch, length=self.length, seed=self.seed)

    def measurement(self, **found: Any) -> Measurement:
        """A row of results with `found` in it."""
        return Measurement(
            workload=self.workload,
            unit=find_workload(self.workload).unit,
            strategy=self.strategy,
            cards=len(self.card_names),
            card_names=self.card_names,
            simulated=self.simulated,
            scaling=self.scaling,
            batch=self.batch,
            per_card_batch=shard_sizes(self.batch, len(self.card_names))[0],
            precision=self.precision,
            **found,
        )

    def to_json(self) -> str:
        """The row as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RowSpec:
        """The opposite of `to_json`."""
        fields = json.loads(text)
        fields["card_names"] = tuple(fields["card_names"])
        return cls(**fields)
