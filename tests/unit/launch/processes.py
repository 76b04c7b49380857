"""Real processes for tests: started with a mark in their environment, by which whatever is left of them is found."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from manycard import errors

MARK = "MANYCARD_TEST_MARK"
SOURCE = str(Path(errors.__file__).resolve().parents[1])


@dataclass(frozen=True)
class Playground:
    """A folder for scripts, one for temporary files, and the mark of the processes started from here."""

    folder: Path
    temporary: Path
    mark: str

    def write(self, name: str, text: str) -> str:
        """Write a script and return its path."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return str(path)

    def environment(self) -> dict[str, str]:
        """The environment of a process started from here."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MANYCARD_")}
        paths = [SOURCE, *filter(None, [os.environ.get("PYTHONPATH")])]
        return kept | {
            MARK: self.mark,
            "TMPDIR": str(self.temporary),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
        }

    def start(self, *words: str, **settings: object) -> subprocess.Popen[str]:
        """Start ``python *words``."""
        return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
            [sys.executable, *words],
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **settings,
        )

    def run(self, *words: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
        """Run ``python *words`` to its end."""
        with self.start(*words) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def left(self) -> list[psutil.Process]:
        """Processes with the mark that still run, this one apart."""
        return [process for process in psutil.process_iter() if self._runs_here(process)]

    def _runs_here(self, process: psutil.Process) -> bool:
        try:
            marked = process.pid != os.getpid() and process.environ().get(MARK) == self.mark
            return marked and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):  # it has ended, or is somebody else's
            return False

    def nothing_left(self, seconds: float = 20.0) -> bool:
        """Whether every marked process has ended within `seconds`, and no temporary file is left."""
        return wait_until(lambda: not self.left(), seconds) and wait_until(
            lambda: not list(self.temporary.iterdir()), seconds
        )


def running_children() -> set[psutil.Process]:
    """What this process has started, and what that has, without what has ended."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.add(child)
    return found


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether `condition` comes true within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def playground(folder: Path) -> Iterator[Playground]:
    """Make one, and kill what a failing test leaves."""
    (folder / "work").mkdir()
    # A short path: loaders' workers make sockets in it, whose paths end at 107 characters.
    with tempfile.TemporaryDirectory(prefix="mc-", ignore_cleanup_errors=True) as temporary:
        place = Playground(folder / "work", Path(temporary), uuid.uuid4().hex)
        try:
            yield place
        finally:
            for process in place.left():
                process.kill()
