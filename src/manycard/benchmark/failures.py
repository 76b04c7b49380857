"""Saying in one line why a row could not be measured."""

from __future__ import annotations

import signal

from manycard.errors import ManycardError, RankFailed

__all__ = ["describe_exit", "describe_failure"]

_OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "can't allocate memory", "not enough memory", "MemoryError")


def describe_failure(error: BaseException) -> str:
    """One line for an exception that ended a row; ``out of memory: ...`` where that is what happened."""
    if isinstance(error, RankFailed):
        line = _last_line(error.trace)
        return _told(f"rank {error.rank}: {line}" if line else str(error), error.trace)
    if isinstance(error, ManycardError):
        return str(error)
    text = f"{type(error).__name__}: {error}"
    return _told(_first_sentences(text), text)


def describe_exit(code: int, written: str) -> str:
    """One line for a process that ended without leaving a result.

    Args:
        code: its exit status; negative for a signal.
        written: the end of what it wrote.
    """
    if code == -signal.SIGKILL:
        return "out of memory or killed: the process was ended by SIGKILL, as the system does when memory runs out"
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
    line = _last_line(written)
    return _told(f"the process {how}" + (f": {line}" if line else ""), written)


def _told(line: str, text: str) -> str:
    if line.startswith("out of memory"):
        return line
    return f"out of memory: {line}" if any(sign in text for sign in _OUT_OF_MEMORY) else line


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _first_sentences(lines[-1]) if lines else ""


def _first_sentences(text: str) -> str:
    """The start of a message that goes on about allocator settings or C++ frames."""
    line = text.splitlines()[0] if text.splitlines() else text
    return line if len(line) <= 300 else line[:297] + "..."
