"""Running the corpus on both cores of a small machine while tests ask for results one by one."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ENVIRONMENT", "Job", "Runs"]

WORKER = Path(__file__).with_name("worker.py")
SOURCE = Path(__file__).parents[2] / "src"
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")])),
}
_WORKERS = 2


@dataclass(frozen=True)
class Job:
    """One run of one script."""

    path: Path
    cards: int = 0
    """Simulated cards; 0 for plain python."""
    sync_batchnorm: bool = False


class Runs:
    """Results of jobs; `expect` starts them, `result` waits for one."""

    def __init__(self) -> None:
        self._workers: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        self._started: list[subprocess.Popen[str]] = []
        for _ in range(_WORKERS):
            worker = subprocess.Popen(
                [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
            )
            self._started.append(worker)
            self._workers.put(worker)
        self._pool = ThreadPoolExecutor(_WORKERS)
        together = threading.Barrier(_WORKERS)
        list(self._pool.map(lambda _: together.wait(), range(_WORKERS)))  # so that no test is said to have left threads
        self._results: dict[Job, Future[dict[str, Any]]] = {}

    def expect(self, job: Job) -> Future[dict[str, Any]]:
        """Have `job` run, once."""
        if job not in self._results:
            self._results[job] = self._pool.submit(self._run, job)
        return self._results[job]

    def result(self, job: Job) -> dict[str, Any]:
        """What came of `job`."""
        return self.expect(job).result(timeout=600)

    def _run(self, job: Job) -> dict[str, Any]:
        worker = self._workers.get()
        try:
            assert worker.stdin is not None
            assert worker.stdout is not None
            words = {"path": str(job.path), "cards": job.cards, "sync_batchnorm": job.sync_batchnorm}
            print(json.dumps(words), file=worker.stdin, flush=True)
            return json.loads(worker.stdout.readline())
        finally:
            self._workers.put(worker)

    def close(self) -> None:
        """End the workers; what has not begun is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        for worker in self._started:
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.close()
            worker.stdout.close()
            worker.wait(timeout=10)
