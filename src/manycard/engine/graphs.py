"""What a train step or a module's calls replay as CUDA graphs, and how they say why they don't."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

from manycard.cards.card import Card
from manycard.engine.calls.call_graphs import CallGraphs
from manycard.engine.recording.recorder import Recorder, make_recorders
from manycard.engine.steps.step_graphs import StepGraphs
from manycard.engine.steps.update_graphs import UpdateGraphs
from manycard.errors import GraphError, SettingError

__all__ = ["Graphs", "Reasons", "make_call_graphs"]


class Reasons:
    """Says why something runs without CUDA graphs.

    Args:
        required: raise instead.
    """

    def __init__(self, *, required: bool) -> None:
        self._required = required
        self.given: list[str] = []

    def give(self, what: str, reason: str) -> None:
        self.given.append(f"{what} without CUDA graphs: {reason}")
        if self._required:
            raise GraphError(f'graphs="on", but {reason}', fix='change that, or take graphs="auto"')
        warnings.warn(self.given[-1], stacklevel=2)


class Graphs:
    """The graphs of one train step: of its passes and of its updates.

    Args:
        recorders: one a card.
        required: raise where a graph can't be made, instead of running eager.
    """

    def __init__(self, recorders: Sequence[Recorder], *, required: bool = False) -> None:
        reasons = Reasons(required=required)
        self.passes = StepGraphs(recorders, partial(reasons.give, "forward and backward run"))
        self.updates = UpdateGraphs(recorders, partial(reasons.give, "updates run"))
        self.reasons = reasons.given
        """Why something runs eager."""


def make_call_graphs(cards: Sequence[Card], mode: str) -> CallGraphs | None:
    """The graphs of a module's spread calls; None where there are none.

    Args:
        mode: ``"off"``, ``"auto"``, or ``"on"``, which raises where calls can't be graphed.

    Raises:
        SettingError: there is no such mode, or it is ``"on"`` and the cards have no graphs.
    """
    if mode not in ("off", "auto", "on"):
        raise SettingError("graphs", mode, "there is no such mode", fix='write "off", "auto" or "on"')
    recorders = make_recorders(cards) if mode != "off" and len(cards) > 1 else []
    if recorders:
        return CallGraphs(recorders, partial(Reasons(required=mode == "on").give, "calls of the module run"))
    if mode == "on":
        why = "calls on one card are not graphed" if len(cards) == 1 else "simulated cards have no CUDA graphs"
        raise SettingError("graphs", mode, why, fix='take graphs="auto"')
    return None
