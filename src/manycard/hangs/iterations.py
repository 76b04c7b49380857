"""Which step of an optimizer ends an iteration of the training, where several optimizers take turns.

Behaviour:
    * With one optimizer (or train step), each of its steps ends an iteration.
    * Where several take turns, one round of them is an iteration: discriminator and generator; five steps of a critic
      and one of a generator; two optimizers that always step together. It ends with the step of the one that ends the
      round, as often as that one stepped in the round before.
    * What ends a round is learned: a round is over when an optimizer steps that has stepped in it, and another since.
      Until the first one is over, the first step of each is counted, and further ones of the one that came last.
    * An optimizer that steps more rarely than every `RARE` steps of another takes no turns with it: it belongs to
      the iteration that it falls into.
    * A round that doesn't end as the one before did is counted when the next one begins.
"""

from __future__ import annotations

__all__ = ["RARE", "Iterations"]

RARE = 20
"""Steps of one optimizer in a row from which others no longer take turns with it."""


class Iterations:
    """Told of each step; says which ones end an iteration. Optimizers are numbers, from 0 in order of appearance."""

    def __init__(self) -> None:
        self._leader: int | None = None
        """Whose steps count while no round is known."""
        self._ender: tuple[int, int] | None = None
        """What ends a round, and with which of its steps in a row."""
        self._round: set[int] = set()
        """Those that have stepped in the open round."""
        self._newest: int | None = None
        self._run = 0
        """How often that one has stepped in a row."""
        self._run_before = 0
        """Likewise, the one before it."""
        self._members: frozenset[int] = frozenset()
        """Those that stepped in the newest round that is over."""
        self._known = 0
        """How many have appeared."""
        self._counted = False
        """Whether the open round was counted."""

    def stepped(self, who: int) -> bool:
        """Note a step; whether an iteration has ended.

        Args:
            who: the number of an optimizer, or of a train step.
        """
        late = self._note(who)
        ends = self._ends(who)
        self._counted |= ends
        return ends or late

    def _note(self, who: int) -> bool:
        """Follow rounds; whether the one that has just ended was not counted."""
        if who == self._newest:
            self._run += 1
            return False
        late = False
        if self._newest is not None and who in self._round:
            late = self._ender is not None and not self._counted
            self._counted = False
            self._members = frozenset(self._round)
            self._round.clear()
            if self._run_before <= RARE:
                self._ender = self._newest, self._run
        self._round.add(who)
        self._newest, self._run_before, self._run = who, self._run, 1
        return late

    def _ends(self, who: int) -> bool:
        if who >= self._known:  # of another phase of the training, or of the first round
            self._known = who + 1
            self._leader = who if self._leader is None else self._leader
            return True
        if self._run > RARE or (self._run > 1 and who not in self._members):  # the others have ended, or are rare
            self._ender, self._leader = None, who
        if self._ender is not None:
            return (who, self._run) == self._ender
        return who == self._leader
