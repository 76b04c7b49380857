"""Running scripts in several processes at once while tests ask for results one by one."""

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


@dataclass(frozen=True)
class Job:
    """One run of one script."""

    path: Path
    cards: int = 0
    """How many; 0 for plain python."""
    sync_batchnorm: bool = False
    on_gpus: bool = False
    """Whether cards are GPUs, and plain python sees the first of them; else they are simulated."""
    outputs: str = "auto"
    """Which outputs stay on the cards that made them."""

    def words(self) -> dict[str, Any]:
        """What a worker reads."""
        spec = f"{'' if self.on_gpus else 'cpu:'}{self.cards}" if self.cards else ""
        alone = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] if self.on_gpus and not self.cards else None
        words = {"path": str(self.path), "cards": spec, "visible": alone, "sync_batchnorm": self.sync_batchnorm}
        return {**words, "outputs": self.outputs}


class Runs:
    """Results of jobs; `expect` starts them, `result` waits for one.

    Args:
        workers: how many scripts run at once.
        environment: of the workers.
    """

    def __init__(self, workers: int = 2, environment: dict[str, str] = ENVIRONMENT) -> None:
        self._workers: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        self._started: list[subprocess.Popen[str]] = []
        for _ in range(workers):
            worker = subprocess.Popen(
                [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
            self._started.append(worker)
            self._workers.put(worker)
        self._pool = ThreadPoolExecutor(workers)
        together = threading.Barrier(workers)
        list(self._pool.map(lambda _: together.wait(), range(workers)))  # so that no test is said to have left threads
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
            print(json.dumps(job.words()), file=worker.stdin, flush=True)
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
            worker.wait(timeout=60)
