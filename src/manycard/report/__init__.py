"""Results shown to people: in the terminal, as HTML, Markdown and CSV, as plots. Decides nothing.

Everything here takes the plain document that ``manycard bench --json`` prints, so a saved file can be shown again.
"""

from __future__ import annotations

from manycard.report.ablation import ablation_markdown, print_ablation
from manycard.report.ablation_page import write_ablation_page
from manycard.report.html import benchmark_page, write_benchmark_page
from manycard.report.markdown import benchmark_markdown
from manycard.report.progress import BenchmarkProgress
from manycard.report.table_file import rows_as_csv
from manycard.report.terminal import print_benchmark, print_comparison

__all__ = [
    "BenchmarkProgress",
    "ablation_markdown",
    "benchmark_markdown",
    "benchmark_page",
    "print_ablation",
    "print_benchmark",
    "print_comparison",
    "rows_as_csv",
    "write_ablation_page",
    "write_benchmark_page",
]
