"""``manycard bench --ablate``: what each setting is worth, alone and together.

Behaviour:
    * As ``manycard bench`` in everything else: the folder, the exit status, ``--against``, ``--resume``. A setting that
      doesn't apply on this machine is a row that says why, and no failure.
    * Options that vary rows themselves are refused: here the rows are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from manycard.benchmark.ablation import AblationSettings, run_ablation
from manycard.cli.bench_results import ResultFolder, termination_as_interrupt
from manycard.errors import SettingError
from manycard.report import BenchmarkProgress, ablation_markdown, print_ablation, write_ablation_page

__all__ = ["ablate_settings", "refuse_with_ablate", "refuse_without_ablate"]


def ablate_settings(settings: AblationSettings, folder: ResultFolder, *, as_json: bool) -> int:
    """Run the ablation, print and save it; the exit status."""
    journal = folder.journal(settings.cards)
    with BenchmarkProgress(Console(stderr=True)) as bars, termination_as_interrupt():
        document = run_ablation(settings, folder.watch(bars), journal)
    return folder.present(
        document, as_json=as_json, show=print_ablation, markdown=ablation_markdown, write_page=write_ablation_page
    )


def refuse_with_ablate(given: Mapping[str, Any]) -> None:
    """Refuse options that mean nothing with --ablate.

    Raises:
        SettingError: one of them has a value.
    """
    for option, value in given.items():
        if value is not None:
            raise SettingError(option, value, "--ablate decides that by itself", fix="leave one of them out")


def refuse_without_ablate(given: Mapping[str, Any]) -> None:
    """Refuse options that are for --ablate.

    Raises:
        SettingError: one of them has a value.
    """
    for option, value in given.items():
        if value is not None:
            raise SettingError(option, str(value), "it is for --ablate", fix="add --ablate, or leave it out")
