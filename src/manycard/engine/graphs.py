"""What a train step replays as CUDA graphs, and how it says why it doesn't."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

from manycard.engine.recorder import Recorder
from manycard.engine.step_graphs import StepGraphs
from manycard.engine.update_graphs import UpdateGraphs
from manycard.errors import GraphError

__all__ = ["Graphs"]


class Graphs:
    """The graphs of one train step: of its passes and of its updates.

    Args:
        recorders: one a card.
        required: raise where a graph can't be made, instead of running eager.
    """

    def __init__(self, recorders: Sequence[Recorder], *, required: bool = False) -> None:
        self._required = required
        self.passes = StepGraphs(recorders, partial(self._give_up, "forward and backward run"))
        self.updates = UpdateGraphs(recorders, partial(self._give_up, "updates run"))
        self.reasons: list[str] = []
        """Why something runs eager."""

    def _give_up(self, what: str, reason: str) -> None:
        self.reasons.append(f"{what} without CUDA graphs: {reason}")
        if self._required:
            raise GraphError(f'graphs="on", but {reason}', fix='change that, or leave graphs="auto"')
        warnings.warn(self.reasons[-1], stacklevel=2)
