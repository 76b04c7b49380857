"""Results shown to people: in the terminal, as HTML, Markdown and CSV, as plots. Decides nothing.

Everything here takes what a command prints with ``--json`` or records, so a saved file can be shown again.
"""

from __future__ import annotations

from manycard.report.ablation import ablation_markdown, print_ablation
from manycard.report.ablation_page import write_ablation_page
from manycard.report.html import benchmark_page, write_benchmark_page
from manycard.report.markdown import benchmark_markdown
from manycard.report.plan_page import plan_page, write_plan_page
from manycard.report.plan_terminal import print_plan
from manycard.report.progress import BenchmarkProgress
from manycard.report.table_file import rows_as_csv
from manycard.report.terminal import print_benchmark, print_comparison

__all__ = [
    "BenchmarkProgress",
    "ablation_markdown",
    "benchmark_markdown",
    "benchmark_page",
    "plan_page",
    "print_ablation",
    "print_benchmark",
    "print_comparison",
    "print_plan",
    "rows_as_csv",
    "write_ablation_page",
    "write_benchmark_page",
    "write_plan_page",
]
