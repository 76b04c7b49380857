"""Results shown to people: in the terminal, as HTML, as plots. Decides nothing.

Everything here takes what a command prints with ``--json`` or records, so a saved file can be shown again.
"""

from __future__ import annotations

from manycard.report.html import benchmark_page, write_benchmark_page
from manycard.report.progress import BenchmarkProgress
from manycard.report.terminal import print_benchmark

__all__ = ["BenchmarkProgress", "benchmark_page", "print_benchmark", "write_benchmark_page"]
