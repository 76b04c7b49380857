"""The temporary folder of one run: what ranks leave for the launcher to read.

    RUN/0/pid         the rank's process, which leads a process group of its own
    RUN/0/ended       there once its script has ended with status 0
    RUN/0/failure     there once its script has failed: a `Failure` as JSON
    RUN/1/stdout.log  what a rank other than 0 writes; rank 0 writes straight through
    RUN/1/stderr.log
    RUN/1/...         what else the rank keeps for the time of the run, in MANYCARD_RANK_FOLDER

Files appear whole: they are written under another name and renamed. Ranks are numbered as LOCAL_RANK is.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Failure", "RankFolder"]

_TAIL = 4000
"""Bytes of a rank's standard error that are shown when it left no traceback."""


@dataclass(frozen=True)
class Failure:
    """How a rank's script failed."""

    time: float
    """Seconds since the epoch."""
    exit_code: int
    """Its exit status; negative for a signal."""
    trace: str
    """Its traceback, from the script's first frame on, or what it asked SystemExit to say."""
    follows: bool
    """Whether it looks like the result of another rank's failure: a connection that closed, a collective that
    was aborted."""


@dataclass(frozen=True)
class RankFolder:
    """One rank's part of a run's folder."""

    path: Path

    @classmethod
    def of(cls, run: Path, rank: int) -> RankFolder:
        """The part of `rank`; makes nothing."""
        return cls(run / str(rank))

    @property
    def stdout(self) -> Path:
        """Where a rank other than 0 writes."""
        return self.path / "stdout.log"

    @property
    def stderr(self) -> Path:
        """Where a rank other than 0 writes its warnings."""
        return self.path / "stderr.log"

    def write_pid(self) -> None:
        """Say that this process is the rank."""
        self._write("pid", str(os.getpid()))

    def pid(self) -> int | None:
        """The rank's process; None until it has started."""
        text = self._read("pid")
        return int(text) if text else None

    def write_ended(self) -> None:
        """Say that the script has ended with status 0."""
        self._write("ended", "")

    def ended(self) -> bool:
        """Whether the script has ended with status 0."""
        return (self.path / "ended").exists()

    def write_failure(self, failure: Failure) -> None:
        """Say how the script failed."""
        self._write("failure", json.dumps(asdict(failure)))

    def failure(self) -> Failure | None:
        """How the script failed; None when it did not, or left no word."""
        text = self._read("failure")
        return Failure(**json.loads(text)) if text else None

    def failed(self) -> bool:
        """Whether the script has said that it failed."""
        return (self.path / "failure").exists()

    def stderr_tail(self) -> str:
        """The end of what the rank wrote to standard error; empty for rank 0."""
        try:
            data = self.stderr.read_bytes()
        except OSError:
            return ""
        return data[-_TAIL:].decode(errors="replace")

    def _write(self, name: str, text: str) -> None:
        partial = self.path / f"{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.path / name)

    def _read(self, name: str) -> str:
        with contextlib.suppress(OSError):
            return (self.path / name).read_text(encoding="utf-8")
        return ""
