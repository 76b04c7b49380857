"""``manycard bench --ablate``: what each setting is worth, alone and together.

Behaviour:
    * As ``manycard bench`` in everything else: the folder, the exit status, ``--against``, ``--resume``. A setting that
      doesn't apply on this machine is a row that says why, and no failure.
    * Options that vary rows themselves are refused: here the rows are given.
"""

from __future__ import annotations

from rich.console import Console

from manycard.benchmark.ablation import AblationSettings, run_ablation
from manycard.cli.bench_results import ResultFolder, termination_as_interrupt
from manycard.report import BenchmarkProgress, ablation_markdown, print_ablation, write_ablation_page

__all__ = ["ablate_settings"]


def ablate_settings(settings: AblationSettings, folder: ResultFolder, *, as_json: bool) -> int:
    """Run the ablation, print and save it; the exit status."""
    journal = folder.journal(settings.cards)
    with BenchmarkProgress(Console(stderr=True)) as bars, termination_as_interrupt():
        document = run_ablation(settings, folder.watch(bars), journal)
    return folder.present(
        document, as_json=as_json, show=print_ablation, markdown=ablation_markdown, write_page=write_ablation_page
    )
