"""Who waits for whom, and what to do: words from the reports of a run's processes. Pure.

A run hangs where a process waits (for other ranks, for its cards, for its loader) in one place all the while. A process
that is busy in the script's own code is no hang by itself: only where others wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manycard.hangs.report import ProcessReport
from manycard.hangs.stacks import ThreadStack

__all__ = ["Verdict", "judge"]

_THREADS = "manycard/engine/driving/threads"
_DEEPEST = 14
"""Frames of a stack that are shown, the innermost ones."""
_FIX_LINE = (
    "look what that line waits for (a lock, a queue, input, another process); a step that needs longer needs a larger "
    "hang_timeout"
)


@dataclass(frozen=True)
class Verdict:
    """A hang."""

    cause: str
    fix: str
    text: str
    """All of it, in lines: who is where, the cause, the fix, and the stacks."""


def judge(
    reports: Sequence[ProcessReport],
    silent: float,
    limit: float,
    *,
    ended: Sequence[str] = (),
    mute: Sequence[str] = (),
    late: Sequence[str] = (),
) -> Verdict | None:
    """What is known of a run without progress.

    Args:
        reports: of each process that runs.
        silent: seconds without progress.
        limit: after how many it counts as a hang.
        ended: ranks whose scripts have ended.
        mute: ranks that answer nothing: something in them holds the interpreter.
        late: cards that have not finished what they were given.

    Returns:
        None where nobody waits, or somebody looks into a process.
    """
    if any(report.debugged for report in reports):
        return None
    alone = len(reports) == 1 and not reports[0].place
    if not any(report.waits_for for report in reports) and not (alone and (reports[0].activity or late)):
        return None
    cause, fix = _cause(reports, ended, mute) if not late else _late(late)
    steps = max((report.steps for report in reports), default=0)
    head = f"the run hangs: no progress for {silent:.0f} s (limit {limit:.0f} s) after {steps} step{'s'[: steps != 1]}"
    lines = [head, *(f"  {line}" for report in reports for line in _place(report))]
    lines += [f"  {rank}: its script has ended" for rank in ended]
    lines += [f"  {rank}: gives no answer, something in it holds the interpreter" for rank in mute]
    lines += [f"cause: {cause}", f"fix: {fix}"]
    return Verdict(cause, fix, "\n".join(lines + _stacks(reports)))


# ---- who is where ------------------------------------------------------------------------------------------


def _place(report: ProcessReport) -> list[str]:
    """Lines on one process."""
    name = report.place or "the script"
    words = {
        "start": "waits for the other ranks in init_process_group",
        "ranks": f"waits for other ranks{_in_collective(report)}",
        "cards": "waits for its cards",
        "loader": "waits for the next batch",
        "": f"is in {report.activity}" if report.activity else "is in the script's own code",
    }
    at = f", at {report.where}" if report.where else ""
    last = ""
    if not report.waits_for and report.collective is not None:
        last = f"; its last collective was {report.collective}"
    return [f"{name}: {words[report.waits_for]}{at}{last}", *(f"  {line}" for line in _cards(report))]


def _in_collective(report: ProcessReport) -> str:
    return f", in {report.collective}" if report.collective is not None and not report.collective.ended else ""


def _cards(report: ProcessReport) -> list[str]:
    if report.waits_for != "cards":
        return []
    return [f"{thread.name.removeprefix('manycard-')}: {_of_card(thread)}" for thread in _card_threads(report)]


def _card_threads(report: ProcessReport) -> list[ThreadStack]:
    threads = [t for t in report.threads if t.name.startswith("manycard-") and not _stands_aside(t)]
    return sorted(threads, key=lambda thread: thread.name)


def _stands_aside(thread: ThreadStack) -> bool:
    """Whether a pipeline's thread says nothing of a card: the card's own while a carrier works for it, and a carrier
    that is idle or stands at a gate."""
    carriers = "manycard/pipeline/carriers"
    if thread.has(carriers, "go_on", "gate"):
        return True
    return thread.has(carriers, "_serve") and not thread.has(carriers, "_run")


def _of_card(thread: ThreadStack) -> str:
    state = _state(thread)
    return state if state else f"is at {thread.where}"


def _state(thread: ThreadStack) -> str:
    """What a card's thread waits for; empty where it runs the script's code."""
    if thread.has(_THREADS, "meet"):
        return "waits in a layer that needs all cards"
    if thread.has(_THREADS, "begin"):
        return "waits for its turn (simulated cards run in turn)"
    if thread.has(_THREADS, "wait"):
        return "waits for another stage"
    if thread.has(_THREADS, "_run_job") or thread.has("manycard/pipeline/carriers", "_run"):
        return ""
    return "has ended its part"


# ---- why ---------------------------------------------------------------------------------------------------


def _cause(reports: Sequence[ProcessReport], ended: Sequence[str], mute: Sequence[str]) -> tuple[str, str]:
    waiting = [report for report in reports if report.waits_for in ("ranks", "start")]
    if not waiting:
        return _alone(next((report for report in reports if report.waits_for), reports[0]))
    others = [report for report in reports if report not in waiting]
    if ended:
        return (
            f"{_names(waiting)} wait{_s(waiting)} for {', '.join(ended)}, whose script has ended: it made fewer steps,"
            " or left out what the others still do",
            "give every rank the same number of batches (parallel.loader does; DistributedSampler, drop_last=True), and"
            " stop early by one decision of all ranks",
        )
    if mute and not others:
        return (
            f"{_names(waiting)} wait{_s(waiting)} for {', '.join(mute)}, which is busy outside Python",
            "look at its native stack: py-spy dump --native --pid PID, or gdb",
        )
    if others:
        return _missing(waiting, others)
    return _all_wait(waiting)


def _missing(waiting: Sequence[ProcessReport], others: Sequence[ProcessReport]) -> tuple[str, str]:
    what = "init_process_group" if waiting[0].waits_for == "start" else "the collective"
    cause = f"{_names(others)} never came to {what} that {_names(waiting)} wait{_s(waiting)} in: {_doing(others[0])}"
    if others[0].waits_for == "loader":
        return cause, "look why its loader yields nothing (a worker that waits, an empty shard); see its stack below"
    return cause, (
        "let all ranks make the same calls in the same order: no collective, backward pass or evaluation under "
        "`if rank == 0` or `continue` on one rank alone; where that rank only needs longer, raise --hang-timeout"
    )


def _doing(report: ProcessReport) -> str:
    if report.waits_for == "loader":
        return "it waits for its loader"
    return f"it is at {report.where}" if report.where else "it runs something else"


def _all_wait(waiting: Sequence[ProcessReport]) -> tuple[str, str]:
    known = [report.collective for report in waiting if report.collective is not None]
    calls = {(each.number, each.name, each.sizes) for each in known}
    if len(known) == len(waiting) and len(calls) > 1:
        each = "; ".join(f"{report.place} in {report.collective}" for report in waiting)
        return (
            f"ranks wait in different collectives, so one of them has left one out or made one more: {each}",
            "let all ranks make the same calls in the same order; the lines above say where each stands",
        )
    lines = {str(report.where) for report in waiting}
    if not known and len(lines) > 1:
        each = "; ".join(f"{report.place} at {report.where}" for report in waiting)
        return (
            f"ranks wait for one another in different places: {each}",
            "let all ranks make the same calls in the same order",
        )
    if waiting[0].waits_for == "start":
        return (
            "ranks can't find one another in init_process_group",
            "check MASTER_ADDR, MASTER_PORT and WORLD_SIZE, and that every rank of the run has started",
        )
    return (
        "all ranks wait in the same collective: the connection between the cards gives no answer",
        "run manycard doctor; try NCCL_P2P_DISABLE=1, then NCCL_SHM_DISABLE=1, and NCCL_DEBUG=INFO to see the links",
    )


def _alone(report: ProcessReport) -> tuple[str, str]:
    if report.waits_for == "loader":
        return (
            "the loader yields no batch",
            "see its stack below: a worker that waits for a lock, for the network or for another process, a dataset "
            "that never ends its __getitem__ or __iter__; num_workers=0 shows the line",
        )
    if report.waits_for != "cards":
        return f"the {report.activity or 'step'} has not ended: it is at {report.where}", _FIX_LINE
    busy = [thread for thread in _card_threads(report) if not _state(thread)]
    if not busy:
        return "no card's thread runs anything: a card doesn't answer", "run manycard doctor, and look at dmesg for Xid"
    place = busy[0].name.removeprefix("manycard-")
    return (
        f"{place} has not ended its part: it is at {busy[0].where}",
        _FIX_LINE,
    )


def _late(late: Sequence[str]) -> tuple[str, str]:
    return (
        f"{', '.join(late)} {'has' if len(late) == 1 else 'have'} not finished what the last step gave",
        "run manycard doctor, and look at dmesg for Xid; try NCCL_P2P_DISABLE=1 where cards wait for one another",
    )


def _names(reports: Sequence[ProcessReport]) -> str:
    return ", ".join(report.place for report in reports)


def _s(reports: Sequence[ProcessReport]) -> str:
    return "s" if len(reports) == 1 else ""


# ---- stacks ------------------------------------------------------------------------------------------------


def _stacks(reports: Sequence[ProcessReport]) -> list[str]:
    lines = []
    for report in reports:
        for thread in report.threads:
            if not thread.main and not _worth_showing(thread):
                continue
            lines.append(f"stack of {report.place + ', ' if report.place else ''}thread {thread.name}, innermost last:")
            begin = next((index for index, frame in enumerate(thread.frames) if frame.mine), 0)
            shown = thread.frames[begin:][-_DEEPEST:]
            if len(shown) < len(thread.frames) - begin:
                lines.append(f"    ... {len(thread.frames) - begin - len(shown)} more")
            lines += [f"    {frame}" for frame in shown]
    return lines


def _worth_showing(thread: ThreadStack) -> bool:
    """Whether a further thread may tell something: a card's at work, or one that runs the script's own code."""
    if thread.name.startswith("manycard-"):
        return not _stands_aside(thread) and not _state(thread)
    return any(frame.mine for frame in thread.frames)
