"""Taking a training apart: which rows there are, why some are not, and that each recipe is the same training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from manycard.benchmark import Journal, Measurement
from manycard.benchmark.ablation import STEPS, AblationSettings, run_ablation
from manycard.benchmark.ablation.plan import AblationSpec, plan_rows
from manycard.benchmark.ablation.steps import Situation
from manycard.benchmark.isolated import run_row
from manycard.benchmark.workloads import WORKLOADS
from manycard.benchmark.workloads.mlp import MLP
from manycard.cards import choose_cards
from manycard.errors import SettingError
from tests.unit.benchmark.test_journal import Silent


def settings(**changed: Any) -> AblationSettings:
    return AblationSettings(
        **{"workload": "mlp", "cards": choose_cards("cpu:2").cards, "small": True, "steps": 5, "batch": 10, **changed}
    )


def on_gpus(**changed: Any) -> Situation:
    return Situation(
        **{"simulated": False, "cards": 2, "visible": 4, "workload": WORKLOADS["resnet50"], "files": True, **changed}
    )


def made_up(
    spec: AblationSpec, on_progress: Callable[[int, int], None], time_limit: float, *more: object
) -> Measurement:
    """A row's result without running it: every changed setting adds 100 samples/s; compiling fails."""
    if spec.recipe.compile:
        return spec.measurement(error="out of memory: no")
    speed = 1000.0 + 100 * len(spec.recipe.changed())
    return spec.measurement(samples_per_s=speed, spread=(speed, speed), noise=0.0, repeats=1)


def test_on_several_gpus_with_files_every_step_applies() -> None:
    assert [step.name for step in STEPS if step.why_not(on_gpus()) is not None] == []


@pytest.mark.parametrize(
    ("here", "step", "why"),
    [
        (on_gpus(visible=2), "cards", "all that are visible"),
        (on_gpus(files=False), "workers", "--files"),
        (on_gpus(files=False), "backend", "--files"),
        (on_gpus(workload=MLP), "channels-last", "no images"),
        (on_gpus(cards=1, visible=1), "ddp", "one card"),
        (on_gpus(cards=1, visible=1), "loss", "one card"),
        (on_gpus(simulated=True), "nccl", "NCCL"),
        (on_gpus(simulated=True), "graphs", "no CUDA graphs"),
        (on_gpus(simulated=True), "pinned", "no GPU"),
    ],
)
def test_a_step_that_does_not_apply_says_why(here: Situation, step: str, why: str) -> None:
    (found,) = [each.why_not(here) for each in STEPS if each.name == step]
    assert found is not None
    assert why in found


def test_steps_alone_stand_on_their_way_and_together_on_one_another() -> None:
    rows = plan_rows(settings(only=("precision", "ddp", "static-graph", "graphs", "engine")))
    alone = {row.step: row for row in rows if row.part == "alone"}
    assert alone["static-graph"].beside is not None
    assert alone["static-graph"].beside.recipe.changed() == {"way": "ddp"}
    assert alone["static-graph"].spec.recipe.changed() == {"way": "ddp", "static_graph": True}
    assert alone["precision"].spec.recipe.changed() == {"precision": "bf16"}
    assert alone["graphs"].why_not == "simulated cards have no CUDA graphs"
    together = [row.spec.recipe.changed() for row in rows if row.part == "together"]
    assert together == [
        {"precision": "bf16"},
        {"precision": "bf16", "way": "ddp"},
        {"precision": "bf16", "way": "ddp", "static_graph": True},
        {"precision": "bf16", "way": "dp", "static_graph": True},
    ]


def test_gains_are_over_the_row_that_a_step_stands_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manycard.benchmark.rounds.run_row", made_up)
    watcher = Silent()
    document = run_ablation(settings(only=("precision", "fused", "ddp", "static-graph", "compile", "graphs")), watcher)
    rows = {(row["part"], row["step"]): row for row in document["rows"]}
    assert rows["alone", "static-graph"]["gain"] == pytest.approx(1200 / 1100)
    assert rows["alone", "static-graph"]["total"] == pytest.approx(1.2)
    assert rows["together", "fused"]["gain"] == pytest.approx(1200 / 1100)
    assert rows["together", "static-graph"]["total"] == pytest.approx(1.4)
    assert rows["alone", "graphs"]["skipped"]
    assert rows["alone", "graphs"]["error"] is None
    assert (rows["alone", "compile"]["gain"], rows["alone", "compile"]["error"]) == (None, "out of memory: no")
    assert len(watcher.labels) == len(set(watcher.labels)) == 10, "rows with the same recipe run once"


def test_it_is_taken_up_where_it_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manycard.benchmark.rounds.run_row", made_up)
    cards, file, chosen = choose_cards("cpu:2").cards, tmp_path / "rounds.jsonl", settings(only=("fused", "ddp"))

    class Leaves(Silent):
        def finished(self, row: dict[str, Any], document: dict[str, Any]) -> None:
            if len(self.labels) == 2:
                raise KeyboardInterrupt

    first, second = Leaves(), Silent()
    assert run_ablation(chosen, first, Journal(file, cards))["interrupted"]
    whole = run_ablation(chosen, second, Journal(file, cards, resume=True))
    assert len(first.labels) + len(second.labels) == 4
    assert all(row["samples_per_s"] for row in whole["rows"])


def test_every_way_trains_as_plain_pytorch_does() -> None:
    workload = MLP(small=True)
    torch.manual_seed(0)
    model = workload.make_model()
    optimizer = workload.make_optimizer(model)
    expected = []
    for step in range(6):
        x, y = workload.draw(10, torch.Generator().manual_seed(step % 2))
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    rows = plan_rows(settings(only=("fused", "ddp", "bucket-view")))
    last = {row.step: row.spec for row in rows if row.part != "alone"}
    for name in ("baseline", "bucket-view"):
        spec = last[name]
        assert AblationSpec.from_json(spec.to_json()) == spec
        row = run_row(spec, None, 100.0)
        assert row.error is None, row.trace
        assert row.losses[:6] == pytest.approx(expected, rel=1e-4), name


@pytest.mark.parametrize(
    ("changed", "option"),
    [
        ({"only": ("nope",)}, "--only='nope'"),
        ({"workload": "digits"}, "--workload='digits'"),
        ({"batch": 1}, "--batch=1"),
        ({"files": Path("/nowhere")}, "--files"),
        ({"steps": 0}, "--steps=0"),
        ({"time_limit": 0.0}, "--time-limit"),
    ],
)
def test_a_value_that_cannot_work_is_named_with_its_fix(changed: dict[str, Any], option: str) -> None:
    with pytest.raises(SettingError) as caught:
        settings(**changed)
    assert str(caught.value).startswith(option)
    assert caught.value.fix


def test_too_few_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "class-0").mkdir()
    (tmp_path / "class-0" / "a.jpg").touch()
    with pytest.raises(SettingError, match="holds 1 images, and two batches have 20"):
        settings(workload="resnet18-cifar", files=tmp_path)
