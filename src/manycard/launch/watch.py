"""Watching a run's ranks, and ending them.

torchrun's agent notices a rank that has exited, stops the others by SIGTERM and waits up to 30 seconds for each.
`RankWatch` stands beside it and keeps promises that it doesn't:

    * From the first failure (a rank that died, or one that has said that its script failed and can't get itself
      to exit) or the first Ctrl-C, every rank has `GRACE` seconds; then all that is left is killed.
    * Whatever a rank started is in the rank's process group and ends with it.
    * A second Ctrl-C kills at once.
    * Ranks that make no progress, waiting for one another, are killed, with who waits where in `RankWatch.hang`.

Signals: SIGINT, SIGTERM, SIGHUP and SIGQUIT that arrive in the launcher are handed to the ranks, so a script can
save on Ctrl-C, within the grace. The handlers that were there before come back at the end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing import SignalException

from manycard.errors import HangError
from manycard.launch.folder import Failure, RankFolder
from manycard.launch.hangs import HangLook

__all__ = ["GRACE", "RankWatch"]

GRACE = 5.0
"""Seconds that ranks have to end by themselves once the run is over."""
_PERIOD = 0.05
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")


class RankWatch:
    """Watches the ranks whose folders are in `run`, in a thread of its own.

    Args:
        run: the run's folder.
        ranks: how many ranks there are.
    """

    def __init__(self, run: Path, ranks: int) -> None:
        self._folders = [RankFolder.of(run, rank) for rank in range(ranks)]
        self._processes: dict[int, psutil.Process | None] = {}
        self._deadline: float | None = None
        self._closing = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="manycard-rank-watch", daemon=True)
        self.deaths: dict[int, float] = {}
        """When ranks that had not ended well were seen dead, in seconds since the epoch."""
        self.killed = False
        """Whether SIGKILL was sent because the grace was over."""
        self.stopped_by: int | None = None
        """The signal that asked this process to stop."""
        self.hang: HangError | None = None
        """Why the run was ended, where ranks waited for one another without end."""
        self._hangs = HangLook(
            {rank: folder.path for rank, folder in enumerate(self._folders)}, self._runs, self._processes.get
        )

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def reports(self) -> dict[int, Failure]:
        """What ranks have said of their failures."""
        found = {rank: folder.failure() for rank, folder in enumerate(self._folders)}
        return {rank: failure for rank, failure in found.items() if failure is not None}

    def close(self) -> None:
        """Stop watching, and kill whatever is left of the ranks and of what they started."""
        self._closing = True
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._kill_groups()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Turn signals to this process into the end of the run. Only a main thread can; others leave them be."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {getattr(signal, name): signal.getsignal(getattr(signal, name)) for name in _SIGNALS}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # such as SIGHUP under nohup
                signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> Any:
        if self.stopped_by is not None or self._closing:
            self.stopped_by = self.stopped_by or number
            self._kill_groups()
            return
        self.stopped_by = number
        self._deadline = time.monotonic() + GRACE
        # The agent answers this exception by sending the same signal to every rank's process group.
        raise SignalException(f"received {signal.Signals(number).name}", signal.Signals(number))

    def _watch(self) -> None:
        while not self._over.wait(_PERIOD):
            failed = False
            for rank, folder in enumerate(self._folders):
                if self._is_dead(rank, folder) and not folder.ended():
                    self.deaths.setdefault(rank, time.time())
                failed = failed or rank in self.deaths or folder.failed()
            if failed and self._deadline is None:
                self._deadline = time.monotonic() + GRACE
            if self._deadline is None and (found := self._hangs.look()) is not None:
                self.hang = found
                self._kill_groups()
            if self._deadline is not None and time.monotonic() > self._deadline:
                self.killed = True
                self._kill_groups()

    def _runs(self, rank: int) -> bool:
        """Whether a rank has started, and its script has not ended."""
        folder = self._folders[rank]
        return folder.pid() is not None and not folder.ended() and rank not in self.deaths

    def _is_dead(self, rank: int, folder: RankFolder) -> bool:
        if rank not in self._processes:
            pid = folder.pid()
            if pid is None:
                return False
            try:
                self._processes[rank] = psutil.Process(pid)
            except psutil.NoSuchProcess:
                self._processes[rank] = None
        process = self._processes[rank]
        if process is None:
            return True
        try:
            return bool(process.status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    def _kill_groups(self) -> None:
        for folder in self._folders:
            pid = folder.pid()
            if pid is not None:
                # PermissionError: on macOS, a group of zombies.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
