"""The Python stacks of all threads of this process, as another thread sees them, and what they tell."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Frame", "ThreadStack", "being_debugged", "read_stacks"]

_LIBRARY = tuple(
    os.path.realpath(path) + os.sep
    for path in {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_OURS = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep
_DEBUGGERS = ("bdb.py", "pdb.py", "pydevd.py", "ipdb", "debugpy", "pudb")


@dataclass(frozen=True)
class Frame:
    """One line that waits for the one below it."""

    file: str
    line: int
    function: str
    text: str
    """The line itself; empty where its file can't be read."""

    @property
    def mine(self) -> bool:
        """Whether it is the script's own: no library's and not manycard's."""
        real = os.path.realpath(self.file)
        return not real.startswith((_OURS, *_LIBRARY)) and not self.file.startswith("<")

    def within(self, *parts: str) -> bool:
        """Whether its file's path has one of these in it."""
        path = self.file.replace(os.sep, "/")
        return any(part in path for part in parts)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" + (f": {self.text}" if self.text else "")


@dataclass(frozen=True)
class ThreadStack:
    """One thread's stack."""

    name: str
    main: bool
    """Whether it is the process's main thread."""
    frames: tuple[Frame, ...]
    """The outermost first."""

    @property
    def where(self) -> Frame | None:
        """The innermost line of the script's own; the innermost of all where it has none."""
        own = [frame for frame in self.frames if frame.mine]
        return own[-1] if own else self.frames[-1] if self.frames else None

    def has(self, part: str, *functions: str) -> bool:
        """Whether a frame is in a file whose path has `part` in it, and in one of `functions`, if any are given."""
        return any(f.within(part) and (not functions or f.function in functions) for f in self.frames)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def of(cls, read: dict[str, Any]) -> ThreadStack:
        """From what `as_dict` gave."""
        return cls(read["name"], read["main"], tuple(Frame(**frame) for frame in read["frames"]))


def read_stacks() -> list[ThreadStack]:
    """The stacks of all threads but the calling one, the main thread's first."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        thread = threads.get(ident)
        lines: list[Frame] = []
        at: Any = frame
        while at is not None:
            file, line = at.f_code.co_filename, at.f_lineno or 0
            lines.append(Frame(file, line, at.f_code.co_name, linecache.getline(file, line).strip()))
            at = at.f_back
        name = thread.name if thread is not None else f"thread {ident}"
        found.append(ThreadStack(name, thread is threading.main_thread(), tuple(reversed(lines))))
    return sorted(found, key=lambda stack: not stack.main)


def being_debugged(stacks: Sequence[ThreadStack]) -> bool:
    """Whether somebody stands in a debugger: one of Python's, or one that traces the process."""
    if any(frame.within(*_DEBUGGERS) for stack in stacks for frame in stack.frames):
        return True
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in file)
    except OSError:
        return False
