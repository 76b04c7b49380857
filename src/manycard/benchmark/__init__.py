"""Measuring strategies against each other: workloads and scripts, the matrix of rows, what each setting is worth.

A row runs in its own process (`isolated` starts it, `worker` is it), which times its steps from inside (`meter`) and
comes back as a `Measurement`. Rounds of rows are kept in a `Journal`; two documents of rows are compared by `compare`.
"""

from __future__ import annotations

from manycard.benchmark.axes import read_axes
from manycard.benchmark.comparing import compare
from manycard.benchmark.journal import Journal
from manycard.benchmark.matrix import Watcher, run_matrix
from manycard.benchmark.measurement import Measurement
from manycard.benchmark.results import write_json
from manycard.benchmark.settings import MatrixSettings
from manycard.benchmark.workloads import WORKLOADS

__all__ = [
    "WORKLOADS",
    "Journal",
    "MatrixSettings",
    "Measurement",
    "Watcher",
    "compare",
    "read_axes",
    "run_matrix",
    "write_json",
]
