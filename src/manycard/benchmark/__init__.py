"""Measuring strategies against each other: workloads, timers, and the matrix of rows.

A row runs in its own process (`isolated` starts it, `worker` is it) and comes back as a `Measurement`.
"""

from __future__ import annotations

from manycard.benchmark.matrix import Watcher, run_matrix
from manycard.benchmark.measurement import Measurement
from manycard.benchmark.results import write_json
from manycard.benchmark.settings import MatrixSettings
from manycard.benchmark.workloads import WORKLOADS

__all__ = ["WORKLOADS", "MatrixSettings", "Measurement", "Watcher", "run_matrix", "write_json"]
