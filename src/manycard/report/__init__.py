"""Results shown to people: in the terminal, as HTML, as plots. Decides nothing.

Everything here takes what a command prints with ``--json`` or records, so a saved file can be shown again.
"""

from __future__ import annotations

from manycard.report.html import benchmark_page, write_benchmark_page
from manycard.report.plan_page import plan_page, write_plan_page
from manycard.report.plan_terminal import print_plan
from manycard.report.progress import BenchmarkProgress
from manycard.report.terminal import print_benchmark

__all__ = [
    "BenchmarkProgress",
    "benchmark_page",
    "plan_page",
    "print_benchmark",
    "print_plan",
    "write_benchmark_page",
    "write_plan_page",
]
