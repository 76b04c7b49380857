"""Finding runs: those of ``manycard``, a process by its number, a script by its name.

Behaviour:
    * A run is a process with all that it started. A process that ends while it is looked at is left out.
    * Only what the system lets this user see is found: another container's processes are not.
    * A name that fits no process, or several runs, is an error that says what there is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from manycard.errors import SettingError

__all__ = ["Job", "find_job", "job_of", "manycard_jobs"]

_COMMANDS = frozenset({"run", "bench", "verify", "plan", "profile"})
_LONGEST = 200


@dataclass(frozen=True)
class Job:
    """A run that is watched."""

    process: psutil.Process
    """Its first process."""
    command: str

    @property
    def pid(self) -> int:
        """The number of its first process."""
        return int(self.process.pid)

    def alive(self) -> bool:
        """Whether it still runs."""
        try:
            return bool(self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE)
        except psutil.Error:
            return False

    def family(self) -> list[psutil.Process]:
        """Its processes, the first one first; empty when it has ended."""
        try:
            return [self.process, *self.process.children(recursive=True)]
        except psutil.Error:
            return []

    def simulated(self) -> int | None:
        """How many simulated cards it was told to use, by its command line or its environment."""
        words = _words(self.process)
        told = [word.partition("=")[2] for word in words if word.startswith("--cards=")]
        told += [after for word, after in pairwise(words) if word == "--cards"]
        told += [_variable(self.process, "MANYCARD_CARDS") or ""]
        found = re.fullmatch(r"cpu:\s*([0-9]{1,4})", told[0].strip()) if told[0] else None
        return int(found[1]) if found else None


def job_of(pid: int) -> Job:
    """The run that a process is.

    Raises:
        SettingError: there is no such process.
    """
    try:
        process = psutil.Process(pid)
        return Job(process, _command(_words(process)) or process.name())
    except psutil.Error:
        raise SettingError("--pid", pid, "there is no such process", fix="see ps, or name its script instead") from None


def manycard_jobs() -> list[Job]:
    """The runs of ``manycard`` on this machine, those that another one started left out."""
    return _tops(
        process for process in psutil.process_iter() if process.pid != os.getpid() and _is_manycard(_words(process))
    )


def find_job(name: str) -> Job:
    """The run of a script.

    Args:
        name: the script's file name or path, or a module's name.

    Raises:
        SettingError: no process runs it, or several runs do.
    """
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    jobs = _tops(
        process for process in psutil.process_iter() if process.pid not in own and _runs(_words(process), name)
    )
    if len(jobs) == 1:
        return jobs[0]
    if not jobs:
        raise SettingError("JOB", name, "no process runs a script of that name", fix="see ps, or give --pid")
    listed = "; ".join(f"{job.pid}: {job.command[:60]}" for job in jobs[:4])
    raise SettingError("JOB", name, f"{len(jobs)} runs have that name ({listed})", fix=f"give --pid {jobs[0].pid}, say")


def _tops(processes: Iterable[psutil.Process]) -> list[Job]:
    """The processes that no other of them has started, directly or through others."""
    found = {process.pid: process for process in processes}
    tops = [process for process in found.values() if not found.keys() & _ancestors(process)]
    return sorted((Job(process, _command(_words(process))) for process in tops), key=lambda job: job.pid)


def _ancestors(process: psutil.Process) -> set[int]:
    try:
        return {parent.pid for parent in process.parents()}
    except psutil.Error:
        return set()


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except (psutil.Error, OSError):
        return []


def _variable(process: psutil.Process, name: str) -> str | None:
    try:
        return dict(process.environ()).get(name)
    except (psutil.Error, OSError):
        return None


def _command(words: Sequence[str]) -> str:
    """A command line as people write it: without the path of the interpreter and of the command."""
    if not words:
        return ""
    shown = [Path(words[0]).name, *words[1:]]
    if not shown[0].startswith(("python", "pypy")):
        pass
    elif len(words) > 1 and Path(words[1]).name == "manycard":
        shown = ["manycard", *words[2:]]
    elif words[1:3] == ["-m", "manycard.cli"] or (len(words) > 2 and words[1] == "-c" and "manycard.cli" in words[2]):
        shown = ["manycard", *words[3:]]
    return " ".join(shown)[:_LONGEST]


def _is_manycard(words: Sequence[str]) -> bool:
    shown = _command(words).split()
    return len(shown) > 1 and shown[0] == "manycard" and shown[1] in _COMMANDS


def _runs(words: Sequence[str], name: str) -> bool:
    """Whether a command line has the script as a word of its own, run by Python, manycard or torchrun."""
    if not words or not re.match(r"(python|pypy|manycard|torchrun|accelerate)", Path(words[0]).name):
        return False
    if " monitor " in f" {' '.join(words)} ":  # this command itself, watching the same script
        return False
    return any(word == name or Path(word).name == name for word in words[1:])
