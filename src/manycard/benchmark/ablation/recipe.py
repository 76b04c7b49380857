"""What one training is made of. The defaults are `nn.DataParallel` as people write it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Recipe"]


@dataclass(frozen=True)
class Recipe:
    """One training, by its settings."""

    way: str = "torch_dp"
    """``torch_dp``: `nn.DataParallel` and a loop of PyTorch's own; ``ddp``, ``dp``: those strategies of `Parallel`."""
    chosen_cards: bool = False
    """The cards that manycard chooses, in place of all that are visible."""
    loss_inside: bool = False
    """`nn.DataParallel` round a module that ends in the loss: a number a card is gathered, not outputs."""
    output_last: bool = False
    """`nn.DataParallel` gathers outputs on the last card, and the loss is computed there."""
    precision: str = "default"
    channels_last: bool = False
    pinned: bool = False
    """Batches in pinned memory, copied beside what the card computes."""
    workers: bool = False
    """As many loader workers as there are cores; without it the loop loads by itself."""
    backend: bool = False
    """Images decoded by manycard's fastest backend, in place of Pillow."""
    fused: bool = False
    """The optimizer's fused update."""
    bucket_view: bool = False
    static_graph: bool = False
    bucket_cap_mb: int | None = None
    compile: bool = False
    graphs: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    """Variables of NCCL."""

    @property
    def ddp_options(self) -> dict[str, Any]:
        """The arguments of DistributedDataParallel; PyTorch's defaults where nothing else is said."""
        options: dict[str, Any] = {"gradient_as_bucket_view": self.bucket_view, "find_unused_parameters": False}
        if self.static_graph:
            options["static_graph"] = True
        if self.bucket_cap_mb is not None:
            options["bucket_cap_mb"] = self.bucket_cap_mb
        return options

    def changed(self) -> dict[str, Any]:
        """What differs from the defaults."""
        plain = asdict(Recipe())
        return {name: value for name, value in asdict(self).items() if value != plain[name]}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Recipe:
        """A recipe that has travelled as JSON."""
        pairs = tuple((name, value) for name, value in fields["environment"])
        return cls(**{**fields, "environment": pairs})
