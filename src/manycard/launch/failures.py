"""Which of several failures came first.

When one rank fails, the others usually fail because of it: their collectives end with a closed connection, or they
are stopped. Only the first failure says what is wrong. In order:

    1. what a rank reported of its own, by time;
    2. a rank that died without a word (a signal, ``os._exit``), placed by the time at which it was seen dead;
    3. failures that look like the result of another one, by time, where there is nothing else.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping

from manycard.errors import RankFailed
from manycard.launch.folder import Failure

__all__ = ["first_failure", "follows_from_a_peer", "rank_failed"]

_PEER_GONE = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "gloo/transport",
    "socket closed",
    "remote process exited",
    "nccl communicator was aborted",
)


def follows_from_a_peer(error: BaseException) -> bool:
    """Whether `error`, or one that it was raised from, says that another rank is gone."""
    distributed = sys.modules.get("torch.distributed")
    kinds: tuple[type[BaseException], ...] = ()
    if distributed is not None and hasattr(distributed, "DistError"):
        kinds = (distributed.DistError,)
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, kinds):
            return True
        if isinstance(current, (RuntimeError, OSError)) and any(m in str(current).lower() for m in _PEER_GONE):
            return True
        current = current.__cause__ or current.__context__
    return False


def first_failure(
    reported: Mapping[int, Failure], exit_codes: Mapping[int, int], deaths: Mapping[int, float], *, killed: bool
) -> tuple[int, Failure] | None:
    """Choose the failure to show.

    Args:
        reported: what ranks said of their own failures.
        exit_codes: of every rank that did not end with status 0, in the order in which that was noticed; negative
            for a signal.
        deaths: when ranks that had not ended well were seen dead.
        killed: whether the launcher sent SIGKILL.

    Returns:
        The rank and its failure; None where nothing is known.
    """
    candidates = dict(reported)
    noticed_first = next(iter(exit_codes), None)
    sent = (-signal.SIGTERM, -signal.SIGKILL) if killed else (-signal.SIGTERM,)
    for rank, code in exit_codes.items():
        # The launcher stops the others by signals; the one noticed first was not stopped by it.
        if rank not in candidates and (code not in sent or rank == noticed_first):
            candidates[rank] = Failure(deaths.get(rank, float("inf")), code, "", follows=False)
    if not candidates:
        return None
    return min(candidates.items(), key=lambda item: (item[1].follows, item[1].time))


def rank_failed(rank: int, failure: Failure, fallback_trace: str) -> RankFailed:
    """Make the error that a user sees."""
    error = RankFailed(rank, failure.exit_code, failure.trace or fallback_trace)
    if failure.exit_code == -signal.SIGKILL:
        error.fix = (
            "see whether the machine ran out of memory (`dmesg` names what the kernel killed); if so use fewer "
            "loader workers or a smaller batch"
        )
    elif failure.exit_code == -signal.SIGSEGV:
        error.fix = "set PYTHONFAULTHANDLER=1 and run again, to see the line at which it crashed"
    return error
