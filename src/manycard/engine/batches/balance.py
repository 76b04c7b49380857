"""Finding the shares with which cards finish together, from how long steps took.

Intended behaviour, whatever the times are:
    * A card's time is taken to be proportional to its samples at first. Once it was seen with two different shares, the
      part that doesn't grow with the share (launches, the update) is known as well. Shares are those at which, by that,
      all cards take equally long; medians over a window of steps are what counts.
    * A change is made where it is expected to shorten the slowest card's step by more than the noise of the times and
      more than `Patience.least_gain`, and only where it moves at least one whole sample.
    * At first, and after a change, every window may lead to the next change. Once no change is worth making, times are
      taken now and then only, and two windows in a row must ask for the same before shares are changed again.
    * A change that made steps longer is taken back, and from then on more must be expected of the next one: shares
      don't go to and fro.
    * No share grows beyond what its card has memory for.
    * A card that has run out of memory gets less than it had then, and never as much again.
    * A card that holds up the others with a single sample is named (`held_up_by`): steps would be shorter without it.

Nothing here measures or waits: `Balancer.note` is given times, and gives back a `Change` or None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from manycard.engine.batches.sizes import weighted_sizes
from manycard.engine.driving.card_times import StepTime

__all__ = ["Balancer", "Change", "Patience", "bounded"]

_MOST_CAUTION = 16.0
_AFTER_MEMORY = 0.8
"""The part of its share that a card keeps which has run out of memory."""
_LEAST_LEFT = 0.25
"""The part of its share that a card keeps in a change: what is far from what was measured is not known yet."""
_MOST_WINDOWS = 4
"""How long a window may become, in windows, where the noise of times hides whether a change is worth making."""
_HELD_UP = 1.2
"""How many times as long as all others a card with one sample must take to be named."""
_TELLING = 0.1
"""By what part two sizes must differ for their times to tell what is always there."""
_MOST_FIXED = 0.7
"""The largest part of a step that is believed not to grow with the samples."""


@dataclass(frozen=True)
class Patience:
    """How much is measured before shares change."""

    warm_up: int = 3
    """Steps at the beginning whose times don't count: kernels are chosen and memory is taken in them."""
    after_change: int = 1
    """Steps after a change whose times don't count."""
    window: int = 5
    """Steps of one window while shares are looked for."""
    settled_window: int = 8
    """Steps of one window once they are found."""
    settled_every: int = 4
    """Of so many steps one is timed, once shares are found."""
    rounds: int = 8
    """Changes one after another before shares count as found."""
    least_gain: float = 0.03
    """By what part a step must become shorter."""


@dataclass(frozen=True)
class Change:
    """New shares."""

    weights: tuple[float, ...]
    """One a card; they add up to 1."""
    seconds: tuple[float, ...]
    """What a step took on each card, with the shares of before."""
    expected: float
    """What a step is expected to take on the slowest card."""
    taken_back: bool = False
    """Whether these are the shares of before the last change, which made steps longer."""


@dataclass(frozen=True)
class _Window:
    """What a window of steps showed."""

    sizes: tuple[int, ...]
    """Samples of each card in a step."""
    each: tuple[float, ...]
    """Seconds a sample of each card takes; 0 where it had none."""
    noise: float
    """How far the medians may be off, relatively."""
    fixed: tuple[float, ...] = ()
    """Seconds of each card's step that don't grow with its samples; none known where empty."""

    @property
    def seconds(self) -> tuple[float, ...]:
        return tuple(size * each for size, each in zip(self.sizes, self.each, strict=True))

    @property
    def lines(self) -> list[tuple[float, float]]:
        """For each card the seconds of a step that are always there, and those of each sample more."""
        fixed = self.fixed or (0.0,) * len(self.sizes)
        rest = [(seconds - held, size) for seconds, held, size in zip(self.seconds, fixed, self.sizes, strict=True)]
        return [(held, left / max(size, 1)) for held, (left, size) in zip(fixed, rest, strict=True)]

    def expected(self, sizes: Sequence[int]) -> float:
        """Seconds of the slowest card's step with other sizes."""
        return max(fixed + size * more for (fixed, more), size in zip(self.lines, sizes, strict=True))

    def beside(self, earlier: _Window | None) -> _Window:
        """This window, with what one with other sizes tells about the time that is always there."""
        if earlier is None or not all(self.sizes) or not all(earlier.sizes):
            return self
        found = []
        for card, (size, seconds) in enumerate(zip(self.sizes, self.seconds, strict=True)):
            other = earlier.sizes[card]
            if abs(other - size) < _TELLING * size:
                found.append(0.0)
                continue
            more = (earlier.seconds[card] - seconds) / (other - size)
            found.append(min(max(seconds - more * size, 0.0), _MOST_FIXED * seconds))
        return replace(self, fixed=tuple(found))

    @property
    def slowest(self) -> int:
        return max(range(len(self.sizes)), key=lambda card: self.seconds[card])

    @property
    def held_up_by(self) -> int | None:
        others = [seconds for card, seconds in enumerate(self.seconds) if card != self.slowest]
        alone = self.sizes[self.slowest] == 1 < max(self.sizes)
        return self.slowest if alone and self.seconds[self.slowest] > _HELD_UP * max(others) else None

    @property
    def a_sample(self) -> float:
        """Seconds of a step a sample of the batch."""
        return max(self.seconds) / sum(self.sizes)


class Balancer:
    """Decides on shares for cards that start with equal ones.

    Args:
        cards: how many.
        patience: how much is measured before shares change.
    """

    def __init__(self, cards: int, patience: Patience | None = None) -> None:
        self.patience = patience or Patience()
        self.weights = (1 / cards,) * cards
        self.settled = False
        """Whether shares are found, and only drift is looked for."""
        self.held_up_by: int | None = None
        """The card that took longest in the last window, by `_HELD_UP`, though it had one sample of a batch."""
        self._caps = [float("inf")] * cards
        """The largest share of each card that it may get since it ran out of memory."""
        self._steps: list[StepTime] = []
        self._ignored = self.patience.warm_up
        self._rounds = 0
        self._caution = 1.0
        self._asked: int | None = None
        """The card that the last window, once settled, found too slow."""
        self._earlier: _Window | None = None
        """The window before the last change, while shares are looked for."""
        self._before: tuple[tuple[float, ...], float] | None = None
        """The shares before the last change, and the seconds a sample with them, until the change is judged."""

    @property
    def every(self) -> int:
        """Of how many steps one is to be timed."""
        return self.patience.settled_every if self.settled else 1

    def start_from(self, weights: Sequence[float]) -> None:
        """Go on from shares that were found before."""
        total = sum(weights)
        self.weights = tuple(weight / total for weight in weights)

    def shrink(self, card: int) -> bool:
        """Give less to a card that has run out of memory.

        Returns:
            Whether there are such shares.
        """
        self._caps[card] = _AFTER_MEMORY * self.weights[card]
        weights = bounded(self.weights, self._caps)
        if weights is None:
            return False
        self.weights = weights
        self.settled = False
        self._steps, self._earlier, self._before, self._asked = [], None, None, None
        self._ignored = max(self._ignored, self.patience.after_change)
        return True

    def note(self, step: StepTime, most_shares: Callable[[], Sequence[float]]) -> Change | None:
        """Take in one step's times.

        Args:
            step: the step; steps of batches much smaller than others are left out.
            most_shares: the largest share of a batch that each card has memory for; asked only before a change.

        Returns:
            The shares from now on, where they change.
        """
        if self._ignored:
            self._ignored -= 1
            return None
        self._steps.append(step)
        length = self.patience.settled_window if self.settled else self.patience.window
        if len(self._steps) % length:
            return None
        window = _read(self._steps).beside(self._earlier)
        gain = self._gain(window, self._proposal(window, None))
        unclear = self.patience.least_gain < gain <= self._worth(window)
        if unclear and not self.settled and self._before is None and len(self._steps) < _MOST_WINDOWS * length:
            return None
        self._steps = []
        return self._judge(window, most_shares)

    def _worth(self, window: _Window) -> float:
        """By what part a step must be expected to become shorter."""
        return self._caution * max(self.patience.least_gain, 2 * window.noise)

    def _judge(self, window: _Window, most_shares: Callable[[], Sequence[float]]) -> Change | None:
        worth = self._worth(window)
        self.held_up_by = window.held_up_by
        back = self._take_back(window, worth)
        if back is not None:
            return back
        if self._gain(window, self._proposal(window, None)) <= worth:
            self._settle()
            return None
        weights = self._proposal(window, most_shares())
        if self._gain(window, weights) <= worth:
            self._settle()
            return None
        if self.settled and self._asked != window.slowest:
            self._asked = window.slowest
            return None
        self._before = self.weights, window.a_sample
        self._rounds += 1
        return self._change(window, weights, settled=self._rounds >= self.patience.rounds)

    def _take_back(self, window: _Window, worth: float) -> Change | None:
        """Judge the last change: undo it if steps are longer than before it."""
        if self._before is None:
            return None
        weights, before = self._before
        self._before = None
        if window.a_sample <= before * (1 + worth):
            return None
        self._caution = min(2 * self._caution, _MOST_CAUTION)
        change = self._change(window, weights, settled=True)
        return Change(change.weights, change.seconds, before * sum(window.sizes), taken_back=True)

    def _change(self, window: _Window, weights: tuple[float, ...], *, settled: bool) -> Change:
        self.weights = weights
        self.settled = settled
        self._asked = None
        self._ignored = self.patience.after_change
        if settled:
            self._rounds = 0
        self._earlier = None if settled else window
        sizes = weighted_sizes(sum(window.sizes), weights, everyone=True)
        return Change(weights, window.seconds, window.expected(sizes))

    def _settle(self) -> None:
        self.settled = True
        self._earlier = None
        self._rounds = 0
        self._asked = None

    def _proposal(self, window: _Window, most: Sequence[float] | None) -> tuple[float, ...]:
        """Shares by speed, within what memory allows where that is given."""
        if not all(window.each):
            return self.weights
        level = _level(window.lines, sum(window.sizes))
        cautious = [max(share, _LEAST_LEFT * own) for share, own in zip(level, self.weights, strict=True)]
        shares = [share / sum(cautious) for share in cautious]
        limits = self._caps if most is None else [min(pair) for pair in zip(most, self._caps, strict=True)]
        return bounded(shares, limits) or self.weights

    def _gain(self, window: _Window, weights: tuple[float, ...]) -> float:
        """By what part of it the slowest card's step would become shorter, in whole samples."""
        sizes = weighted_sizes(sum(window.sizes), weights, everyone=True)
        return 1 - window.expected(sizes) / max(window.seconds) if max(window.seconds) else 0.0


def bounded(shares: Sequence[float], most: Sequence[float]) -> tuple[float, ...] | None:
    """Shares that add up to 1, none above its bound, in the given ratios elsewhere; None where there are none.

    Example:
        >>> bounded([0.75, 0.25], [0.6, 1.0])
        (0.6, 0.4)
    """
    if sum(most) < 1:
        return None
    found = list(shares)
    held: set[int] = set()
    while True:
        over = {card for card, share in enumerate(found) if card not in held and share > most[card]}
        if not over:
            return tuple(found)
        held |= over
        left = 1 - sum(most[card] for card in held)
        free = sum(shares[card] for card in range(len(shares)) if card not in held)
        found = [most[card] if card in held else left * share / free for card, share in enumerate(shares)]


def _level(lines: Sequence[tuple[float, float]], samples: int) -> list[float]:
    """The shares with which cards, a fixed time and one for each sample given, end together."""
    cards = list(range(len(lines)))
    while True:
        end = (samples + sum(lines[card][0] / lines[card][1] for card in cards)) / sum(
            1 / lines[card][1] for card in cards
        )
        late = [card for card in cards if lines[card][0] > end]
        if not late:
            break
        cards = [card for card in cards if card not in late]
    sizes = [(end - fixed) / more if card in cards else 0.0 for card, (fixed, more) in enumerate(lines)]
    least = 0.1  # of a sample: weights are above 0
    return [max(size, least) / sum(max(each, least) for each in sizes) for size in sizes]


def _read(steps: Sequence[StepTime]) -> _Window:
    """Medians over the steps of usual size: an epoch's short last batch tells nothing about the others."""
    largest = max(sum(step.samples) for step in steps)
    usual = [step for step in steps if 2 * sum(step.samples) >= largest]
    total = round(median(sum(step.samples) for step in usual))
    of_cards = list(zip(*(step.samples for step in usual), strict=True))
    shares = [sum(of_card) for of_card in of_cards]
    each, noise = [], 0.0
    for card, of_card in enumerate(of_cards):
        found = [step.seconds[card] / size for step, size in zip(usual, of_card, strict=True) if size]
        middle = median(found) if found else 0.0
        each.append(middle)
        if middle:
            spread = 1.48 * median(abs(value - middle) for value in found) / middle
            noise = max(noise, 1.25 * spread / len(found) ** 0.5)
    return _Window(tuple(weighted_sizes(total, [share or 1e-9 for share in shares])), tuple(each), noise)
