"""What `check_lockstep` says of ranks that drift apart, each for another reason; and of ranks that don't."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manycard.cards import choose_cards
from manycard.launch import launch_script

from . import ranks_worker

Said = dict[str, Any]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Said]:
    """What was said of a case; ranks must have come to one verdict."""
    folder = tmp_path_factory.mktemp("lockstep")
    worker = Path(ranks_worker.__file__)
    launch_script([str(worker), str(folder)], choose_cards("cpu:2").cards, env={"OMP_NUM_THREADS": "1"})
    one, other = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2))

    def of(case: str) -> Said:
        assert one[case]["findings"] == other[case]["findings"]
        found: Said = one[case]
        return found

    return of


PLANTED = {
    "method_on_the_inner_module": ("never went through DistributedDataParallel", "a.weight", "model.module(x)"),
    "second_loss_round_the_wrapper": ("went round the wrapper", "a.weight", "model.module"),
    "layer_added_after_wrapping": ("added or unfrozen after", "head.weight", "wrap the model afterwards"),
    "unfrozen_after_wrapping": ("added or unfrozen after", "a.weight", "unfreeze all layers first"),
    "no_sync_in_the_last_micro_batch": ("inside no_sync", "a.weight", "*last* micro-batch"),
    "another_order": ("registered in another order", "place 1: a.weight on rank 0, b.weight on rank 1", "sort"),
    "another_model": ("parameters on rank 1 that it has not on rank 0", "1.weight", "same model on every rank"),
    "unused_parameter_in_the_bucket": ("share a bucket", "no gradient: b.bias", "find_unused_parameters=True"),
    "no_wrapper": ("averaged by nobody", "a.weight", "wrap it"),
    "started_apart": ("parameters differ between ranks", "a.weight", "same weights before"),
    "changed_in_rank_0_only": ("differ between ranks: a.bias", "their gradients are equal", "every rank alike"),
    "nan_in_rank_1_only": ("inf or NaN on rank 1 only", "parameter b.weight", "clip"),
    "trained_outside_the_wrapper": (
        "not the model's",
        "optimizer's group 0, parameter 4 (4)",
        "parameters of a module",
    ),
    "a_loop_that_goes_wrong_at_step_7": ("went round", "after step 10 and not yet after step 5", "model.module"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_cause_is_named(said: Callable[[str], Said], case: str) -> None:
    found = said(case)
    cause, evidence, fix = PLANTED[case]
    first = found["findings"][0]
    assert first.startswith("error: ")
    assert cause in first
    assert evidence in first
    assert fix in first
    assert cause in found["error"]


@pytest.mark.parametrize("case", ["healthy", "a_train_step"])
def test_nothing_is_said_of_ranks_in_lockstep(said: Callable[[str], Said], case: str) -> None:
    found = said(case)
    assert found["findings"] == []
    assert "rank 0, rank 1 are in lockstep: 4 parameters and 4 gradients compared" in found["report"]


def test_running_statistics_differ_by_design(said: Callable[[str], Said]) -> None:
    (only,) = said("batchnorm")["findings"]
    assert only.startswith("note: running statistics of BatchNorm differ, as they do by design")
    assert "sync_batchnorm=True" in only


def test_other_buffers_are_a_warning(said: Callable[[str], Said]) -> None:
    (only,) = said("codebook")["findings"]
    assert only.startswith("warning: buffers differ")
    assert "codes on rank 1" in only
