"""A pipeline trains every case as plain PyTorch does on one card; fp64, as in `test_equivalence`."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from torch.utils.data import DataLoader

import manycard as mc

from .cases import CASES, STEPS, Case
from .reference import Outcome, outcome, prepare, train_in_groups, with_grad

HERE = [case for case in CASES if not case.options and case.name != "gradient_penalty"]
"""All that need no further setting, but for the one that each stage would have to know the others' graphs for."""
BY_NAME = {case.name: case for case in CASES}


@cache
def reference(name: str) -> Outcome:
    return train_in_groups(BY_NAME[name], torch.float64)


def train(case: Case, **settings: object) -> Outcome:
    """A case's training by a pipeline."""
    setting = prepare(case, torch.float64)
    losses: list[float] = []
    had: set[str] = set()
    pipeline = mc.Pipeline(setting.model, **settings)
    step = pipeline.train_step(
        case.loss_fn,
        setting.optimizers,
        clip_norm=case.clip_norm,
        accumulate=case.accumulate,
        scheduler=setting.scheduler,
    )
    loader = pipeline.loader(DataLoader(setting.samples, case.batch_size))
    while len(losses) < STEPS:
        for batch in loader:
            losses.append(step(batch).item())
            if step.updated:
                had |= with_grad(setting.model)
            if len(losses) == STEPS:
                break
    step.flush()
    had |= with_grad(setting.model)
    pipeline.close()
    return outcome(setting, losses, had)


@pytest.mark.parametrize("name", [case.name for case in HERE])
def test_a_pipeline_trains_as_one_card(name: str) -> None:
    expected = reference(name)
    actual = train(BY_NAME[name], cards="cpu:2", micro_batches=3)
    assert actual.losses == pytest.approx(expected.losses, rel=1e-9, abs=1e-9)
    assert actual.tensors.keys() == expected.tensors.keys()
    for key, tensor in expected.tensors.items():
        close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}")
        close(actual.tensors[key], tensor)
    assert actual.without_grad == expected.without_grad
    assert actual.learning_rates == pytest.approx(expected.learning_rates, rel=1e-12)


def test_a_loss_that_differentiates_the_model_is_refused() -> None:
    with pytest.raises(mc.errors.ModelError, match="own graph only"):
        train(BY_NAME["gradient_penalty"], cards="cpu:2", stages=["head"], micro_batches=2)
