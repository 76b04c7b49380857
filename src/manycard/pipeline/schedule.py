"""The order in which a card runs its micro-batches: pure, a list of actions a stage.

Behaviour, for p stages and m micro-batches:
    * ``gpipe``: all forward passes, then all backward passes. A stage holds the activations of m micro-batches.
    * ``1f1b``: stage k runs p - k - 1 forward passes ahead, then one forward and one backward pass in turn, so that it
      holds the activations of at most p - k micro-batches, however many there are.
    * Each micro-batch goes forward once and backward once on every stage, in the order of their numbers.
    * With stages of equal time, a card of either is idle for (p - 1) / (m + p - 1) of a step: the *bubble*.

Sources: Huang et al., GPipe (2019); Narayanan et al., PipeDream-Flush in "Memory-Efficient Pipeline-Parallel DNN
Training" (2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manycard.errors import SettingError

__all__ = ["Action", "bubble", "find_schedule", "in_flight"]


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch on one stage."""

    backward: bool
    micro_batch: int

    def __str__(self) -> str:
        return f"{'B' if self.backward else 'F'}{self.micro_batch}"


Schedule = Callable[[int, int, int], "list[Action]"]
"""Called with a stage's index, the number of stages and that of micro-batches; the stage's actions in order."""


def _gpipe(stage: int, stages: int, micro_batches: int) -> list[Action]:
    return [Action(backward, number) for backward in (False, True) for number in range(micro_batches)]


def _one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Action]:
    ahead = min(stages - stage - 1, micro_batches)
    actions = [Action(False, number) for number in range(ahead)]
    for number in range(micro_batches - ahead):
        actions += [Action(False, number + ahead), Action(True, number)]
    return actions + [Action(True, number) for number in range(micro_batches - ahead, micro_batches)]


_SCHEDULES: dict[str, Schedule] = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward}


def find_schedule(name: str) -> Schedule:
    """The schedule called `name`.

    Raises:
        SettingError: there is none.

    Example:
        >>> " ".join(str(action) for action in find_schedule("1f1b")(0, 2, 3))
        'F0 F1 B0 F2 B1 B2'
    """
    if not isinstance(name, str) or name not in _SCHEDULES:
        fix = f"choose one of {', '.join(_SCHEDULES)}"
        raise SettingError("schedule", name, "there is no such schedule", fix=fix)
    return _SCHEDULES[name]


def in_flight(actions: Sequence[Action]) -> int:
    """The most micro-batches that have gone forward and not yet backward at any time."""
    most = held = 0
    for action in actions:
        held += -1 if action.backward else 1
        most = max(most, held)
    return most


def bubble(stages: int, micro_batches: int) -> float:
    """The idle share of a step whose stages take equal times.

    Example:
        >>> round(bubble(2, 8), 3)
        0.111
    """
    return (stages - 1) / (micro_batches + stages - 1)
