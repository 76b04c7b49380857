"""The sweep: settings compared with NCCL's default, interleaved with it, and a decision beyond the noise.

Behaviour:
    * First each candidate once, between runs of the default. Then the three best and what they give together,
      in several rounds, each again between runs of the default. A trial is compared with the defaults just before
      and after it, so that a machine that warms up or gets busy favours nobody.
    * A candidate wins when it is faster in every round, by half as much again as the default differs from itself,
      by at least 2 %, and slower for no size by more than 5 %. Otherwise the default stays.
    * A trial that fails, hangs or adds up wrongly is out, with its reason, and the sweep goes on. A default that
      fails ends it (TrialFailed).

The logic knows no cards: `run` gives the seconds of an all-reduce by its size.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

__all__ = ["Sweep", "Times", "Trial", "TrialFailed", "sweep"]

Settings = Mapping[str, str]
Times = Mapping[int, float]
"""Bytes on each card -> seconds of one all-reduce."""
Run = Callable[[Settings], Times]

_FINALISTS = 3
_BETWEEN_DEFAULTS = 3
_LEAST_GAIN = 1.02
_TIMES_NOISE = 1.5
"""The best of a dozen candidates is the luckiest too, so it must be better than one lucky run."""
_MOST_LOSS = 0.95


class TrialFailed(Exception):
    """A trial gave no times; its text says why."""


@dataclass(frozen=True)
class Trial:
    """What became of one candidate."""

    settings: Settings
    gain: float | None = None
    """Times as fast as the default, the geometric mean over sizes; of the final, the median of the rounds."""
    least: float | None = None
    """Its gain in its worst round."""
    by_size: Times = field(default_factory=dict)
    """Bytes -> gain."""
    final: bool = False
    """Whether it was in the final."""
    failure: str = ""


@dataclass(frozen=True)
class Sweep:
    """What a sweep found."""

    best: Trial | None
    """The winner; None where nothing beats the default beyond the noise."""
    trials: tuple[Trial, ...]
    """All candidates, the fastest first, failed ones last."""
    noise: float
    """How much the default differed from itself, as a share."""
    default: Times
    """The default's median times."""


def sweep(
    run: Run,
    candidates: Sequence[Settings],
    on_trial: Callable[[Settings, int, int], None] = lambda settings, done, total: None,
    *,
    rounds: int = 3,
) -> Sweep:
    """Compare candidates with the default.

    Args:
        run: runs one setting and gives its times; raises TrialFailed.
        candidates: settings to try, one variable each.
        on_trial: called before each run, with the number of runs done and expected.
        rounds: of the final.

    Raises:
        TrialFailed: the default itself fails.
    """
    expected = _first_runs(len(candidates)) + rounds * (2 * _FINALISTS + 2) if candidates else 1
    counted = _Counted(run, on_trial, expected)
    first = _one_round(counted, list(candidates))
    alive = sorted((trial for trial in first.trials if trial.gain), key=lambda trial: -(trial.gain or 0))
    finalists = _finalists(alive)
    finals = (
        [_one_round(counted, [*finalists[turn:], *finalists[:turn]]) for turn in range(rounds)] if finalists else []
    )
    defaults = [times for played in [first, *finals] for times in played.defaults]
    noise = _noise(defaults)
    decided = [_decided(settings, finals) for settings in finalists]
    best = max((trial for trial in decided if _wins(trial, noise)), key=lambda trial: trial.gain or 0, default=None)
    seen = {_key(trial.settings) for trial in decided}
    others = [trial for trial in first.trials if _key(trial.settings) not in seen]
    ranked = sorted([*decided, *others], key=lambda trial: -(trial.gain or 0))
    return Sweep(best, tuple(ranked), noise, _median_times(defaults))


@dataclass
class _Counted:
    """Runs, counted for the progress bar."""

    run: Run
    on_trial: Callable[[Settings, int, int], None]
    expected: int
    done: int = 0

    def __call__(self, settings: Settings) -> Times:
        self.on_trial(settings, self.done, max(self.expected, self.done + 1))
        self.done += 1
        return self.run(settings)


@dataclass(frozen=True)
class _Round:
    trials: list[Trial]
    defaults: list[Times]


def _first_runs(candidates: int) -> int:
    return candidates + math.ceil(candidates / _BETWEEN_DEFAULTS) + 1


def _one_round(run: _Counted, candidates: Sequence[Settings]) -> _Round:
    """Each candidate once, in groups between runs of the default."""
    defaults = [run({})]
    trials: list[Trial] = []
    for start in range(0, len(candidates), _BETWEEN_DEFAULTS):
        group = [(settings, *_try(run, settings)) for settings in candidates[start : start + _BETWEEN_DEFAULTS]]
        defaults.append(run({}))
        beside = _median_times(defaults[-2:])
        for settings, times, failure in group:
            if times is None:
                trials.append(Trial(settings, failure=failure))
            else:
                by_size = {size: beside[size] / times[size] for size in beside if size in times}
                trials.append(Trial(settings, _mean(list(by_size.values())), by_size=by_size))
    return _Round(trials, defaults)


def _try(run: Run, settings: Settings) -> tuple[Times | None, str]:
    try:
        return run(settings), ""
    except TrialFailed as failed:
        return None, str(failed)


def _finalists(alive: Sequence[Trial]) -> list[Settings]:
    """The best single settings that seem to gain, and the pairs of them that set different variables."""
    best: list[Settings] = []
    for trial in alive:
        if (trial.gain or 0) > 1 and len(best) < _FINALISTS:
            best.append(trial.settings)
    pairs = [{**one, **other} for one, other in combinations(best, 2) if not one.keys() & other.keys()]
    return [*best, *pairs]


def _decided(settings: Settings, finals: Sequence[_Round]) -> Trial:
    played = [trial for final in finals for trial in final.trials if _key(trial.settings) == _key(settings)]
    failures = [trial.failure for trial in played if trial.failure]
    gains = [trial.gain for trial in played if trial.gain is not None]
    if failures or not gains:
        return Trial(settings, failure=failures[0] if failures else "it was never run", final=True)
    by_size = {size: statistics.median(trial.by_size[size] for trial in played) for size in played[0].by_size}
    return Trial(settings, statistics.median(gains), min(gains), by_size, final=True)


def _wins(trial: Trial, noise: float) -> bool:
    if trial.gain is None or trial.least is None:
        return False
    beyond = trial.gain > max(1 + _TIMES_NOISE * noise, _LEAST_GAIN) and trial.least > 1
    return beyond and min(trial.by_size.values()) >= _MOST_LOSS


def _noise(defaults: Sequence[Times]) -> float:
    """The largest difference between neighbouring runs of the default."""
    ratios = [_mean([one[size] / other[size] for size in one]) for one, other in pairwise(defaults)]
    return max((abs(ratio - 1) for ratio in ratios), default=0.0)


def _median_times(runs: Sequence[Times]) -> dict[int, float]:
    return {size: statistics.median(times[size] for times in runs) for size in runs[0]}


def _mean(ratios: Sequence[float]) -> float:
    """The geometric mean, in which twice as fast and half as fast cancel."""
    return math.exp(statistics.fmean(map(math.log, ratios)))


def _key(settings: Settings) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(settings.items()))
