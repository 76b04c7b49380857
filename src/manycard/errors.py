"""Every error that manycard raises for something its user can mend.

    ManycardError
    ├── SettingError          a setting has a value that can't work (exit status 2 on the command line)
    │   ├── CardsError        cards=, --cards, device_ids, CUDA_VISIBLE_DEVICES
    │   └── StrategyError     an unknown strategy, or one that can't do what is asked of it
    ├── ModelError            the module can't be put on several cards as it is written
    ├── DataError             a data file can't be used, or a process that loads has ended
    ├── BatchError            a batch or an output can't be cut or joined
    ├── LossError             the loss is not what the step can make exact
    ├── OptimizerError        the optimizer doesn't fit the model or the strategy
    ├── GraphError            graphs="on", and a step that CUDA graphs can't repeat
    ├── LockstepError         replicas that must be equal are not
    ├── HangError             a step, a loader or a rank gives no sign of life
    ├── CheckpointError       a checkpoint can't be written or read
    ├── MissingExtraError     an optional package is not installed
    └── LaunchError           ranks could not be started, or one of them failed
        ├── NeedsRanks        the script asks for one process per card and runs in one
        └── RankFailed        the first rank that failed, with its traceback

Each says what is wrong, with the value, and what to do about it. Anything else that escapes from manycard
(an AssertionError, say) is a fault of manycard's own.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "BatchError",
    "CardsError",
    "CheckpointError",
    "DataError",
    "GraphError",
    "HangError",
    "LaunchError",
    "LockstepError",
    "LossError",
    "ManycardError",
    "MissingExtraError",
    "ModelError",
    "NeedsRanks",
    "OptimizerError",
    "RankFailed",
    "SettingError",
    "StrategyError",
]


class ManycardError(Exception):
    """The root of the tree.

    Args:
        problem: what is wrong, with the values that show it; no full stop at the end.
        fix: what to do, as an imperative sentence without its full stop; may be empty.

    Example:
        >>> str(ManycardError("the batch has 0 samples", fix="drop empty batches in the loader"))
        'the batch has 0 samples. Fix: drop empty batches in the loader.'
    """

    def __init__(self, problem: str, *, fix: str = "") -> None:
        self.problem = problem
        self.fix = fix
        super().__init__(problem, fix)

    def __str__(self) -> str:
        return f"{self.problem}. Fix: {self.fix}." if self.fix else f"{self.problem}."

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.__dict__.copy())


def _rebuild(kind: type[ManycardError], state: dict[str, object]) -> ManycardError:
    """Make an error again on the other side of a process boundary, whatever its constructor takes."""
    error = kind.__new__(kind)
    error.__dict__.update(state)
    error.args = (state["problem"], state["fix"])
    return error


_LONGEST = 160
"""Characters of a value that a message shows."""


class SettingError(ManycardError):
    """A setting has a value that can't work.

    Args:
        setting: the setting as the user wrote it, such as ``cards`` or ``--batch``.
        value: the value that was given.
        problem: why that value can't work.
        fix: what to write instead.

    Example:
        >>> str(SettingError("accumulate", 0, "it must be at least 1", fix="leave it out for one update a step"))
        'accumulate=0: it must be at least 1. Fix: leave it out for one update a step.'
    """

    def __init__(self, setting: str, value: object, problem: str, *, fix: str = "") -> None:
        self.setting = setting
        self.value = _shown(value)
        super().__init__(f"{setting}={self.value}: {problem}", fix=fix)


def _shown(value: object) -> str:
    """A value as a reader knows it: as it was written, or by its name or kind where that would be an address."""
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):  # a function or a class
        return name.replace("<locals>.", "")
    text = repr(value)
    if " at 0x" in text or "\n" in text:
        return f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


class CardsError(SettingError):
    """The cards asked for are not there, or can't be used together."""


class StrategyError(SettingError):
    """The strategy is unknown, or can't do what is asked of it."""


class ModelError(ManycardError):
    """The module can't be put on several cards as it is written."""


class DataError(ManycardError):
    """A file of data can't be used as it is, or a process that loads data has ended."""


class BatchError(ManycardError):
    """A batch can't be cut into shards, or outputs can't be joined."""


class LossError(ManycardError):
    """The loss is not what the step can make exact on several cards."""


class OptimizerError(ManycardError):
    """The optimizer doesn't fit the model or the strategy."""


class GraphError(ManycardError):
    """CUDA graphs were asked for, and a step holds what they can't repeat."""


class LockstepError(ManycardError):
    """Replicas that must hold equal parameters do not.

    Args:
        problem: what differs, and where.
        fix: what to do.
        findings: each difference as a `Finding`, the gravest first, where they were looked for.
    """

    def __init__(self, problem: str, *, fix: str = "", findings: Sequence[object] = ()) -> None:
        super().__init__(problem, fix=fix)
        self.findings = tuple(findings)


class HangError(ManycardError):
    """A run makes no progress.

    Args:
        problem: who waits for whom.
        fix: what to do.
        report: who is where, with stacks, in lines.
    """

    def __init__(self, problem: str, *, fix: str = "", report: str = "") -> None:
        super().__init__(problem, fix=fix)
        self.report = report


class CheckpointError(ManycardError):
    """A checkpoint can't be written or read."""


class MissingExtraError(ManycardError):
    """An optional package is needed and not installed.

    Args:
        package: what could not be imported.
        extra: the extra of manycard that brings it.
        purpose: what it is needed for.
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}, which is not installed", fix=f"pip install 'manycard[{extra}]'")


class LaunchError(ManycardError):
    """Ranks could not be started, or one of them failed."""


class NeedsRanks(LaunchError):
    """The script asks for one process per card and runs in a single process."""


class RankFailed(LaunchError):
    """The first rank that failed.

    Args:
        rank: which one.
        exit_code: its exit status; negative for a signal.
        trace: its traceback, or the end of what it wrote to standard error; may be empty.
    """

    def __init__(self, rank: int, exit_code: int, trace: str) -> None:
        how = f"was ended by signal {-exit_code}" if exit_code < 0 else f"exited with status {exit_code}"
        super().__init__(f"rank {rank} {how}; the other ranks were stopped")
        self.rank = rank
        self.exit_code = exit_code
        self.trace = trace
