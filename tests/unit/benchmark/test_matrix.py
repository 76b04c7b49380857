"""The matrix: which rows there are, and that they measure the same training as plain PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from manycard.benchmark import MatrixSettings, Measurement, run_matrix
from manycard.benchmark.isolated import run_row
from manycard.benchmark.matrix import matrix_notes, matrix_rows
from manycard.benchmark.pipeline_run import PipelineRun
from manycard.benchmark.row import RowSpec
from manycard.benchmark.training import make_parallel
from manycard.benchmark.worker import measure
from manycard.benchmark.workloads.mlp import MLP
from manycard.cards import Card, choose_cards
from manycard.parallel import Parallel
from tests.unit.launch.processes import running_children

GPUS = tuple(Card(place, torch.device("cuda", index), "NVIDIA H200") for place, index in enumerate((0, 2, 3, 5)))


class Listener:
    """Keeps what a matrix says, and can interrupt it."""

    def __init__(self, interrupt_at: int | None = None) -> None:
        self.labels: list[str] = []
        self.progress: list[tuple[int, int]] = []
        self.documents: list[dict[str, Any]] = []
        self._interrupt_at = interrupt_at

    def started(self, label: str, round_number: int, rounds: int) -> None:
        self.labels.append(f"{label} {round_number}/{rounds}")

    def progressed(self, done: int, total: int) -> None:
        self.progress.append((done, total))
        if len(self.labels) == self._interrupt_at:
            raise KeyboardInterrupt

    def finished(self, row: dict[str, Any], document: dict[str, Any]) -> None:
        self.documents.append(document)


def simulated(count: int = 2, **changed: Any) -> MatrixSettings:
    return MatrixSettings(
        **{"workloads": ("mlp",), "cards": choose_cards(f"cpu:{count}").cards, "small": True, "steps": 5, **changed}
    )


def plain_losses(batch: int, steps: int) -> list[float]:
    """The losses of the small MLP on one card, by PyTorch alone."""
    workload = MLP(small=True)
    torch.manual_seed(0)
    model = workload.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = [workload.draw(batch, torch.Generator().manual_seed(number)) for number in range(2)]
    losses = []
    for step in range(steps):
        inputs, labels = batches[step % 2]
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_single_runs_once_on_the_first_card_and_the_others_on_every_count() -> None:
    settings = MatrixSettings(workloads=("mlp",), cards=GPUS, counts=(2, 4), strategies=("dp", "single"))
    rows = [(row.strategy, row.cards, row.batch) for row in matrix_rows(settings)]
    assert rows == [("single", "0,", 256), ("dp", "0,2", 512), ("dp", "0,2,3,5", 1024)]


def test_torch_dp_is_left_out_on_simulated_cards_and_that_is_said() -> None:
    assert [row.strategy for row in matrix_rows(simulated())] == ["single", "dp", "ddp"]
    assert any("torch_dp is left out" in note for note in matrix_notes(simulated()))
    on_gpus = MatrixSettings(workloads=("mlp",), cards=GPUS)
    assert "torch_dp" in [row.strategy for row in matrix_rows(on_gpus)]
    assert not any("torch_dp" in note or "simulated" in note for note in matrix_notes(on_gpus))


def test_a_row_travels_as_json() -> None:
    row = matrix_rows(simulated())[1]
    assert RowSpec.from_json(row.to_json()) == row


def test_every_strategy_computes_what_plain_pytorch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    # Settings for scripts must not reach the rows, where they would win.
    monkeypatch.setenv("MANYCARD_STRATEGY", "dp")
    monkeypatch.setenv("MANYCARD_CARDS", "cpu:4")
    listener = Listener()
    rows = run_matrix(simulated(batch=10), listener)["rows"]
    assert [(row["strategy"], row["cards"], row["error"]) for row in rows] == [
        ("single", 1, None),
        ("dp", 2, None),
        ("ddp", 2, None),
    ]
    expected = plain_losses(batch=10, steps=max(len(row["losses"]) for row in rows))
    for row in rows:
        assert len(row["losses"]) == row["warm_up_steps"] + row["steps"] >= 6
        assert row["losses"] == pytest.approx(expected[: len(row["losses"])], rel=1e-4), row["strategy"]
        assert row["largest_loss_difference"] < 1e-4
        assert row["final_loss"] == row["losses"][-1]
        assert row["samples_per_s"] > 0
        assert row["peak_memory_mib"] == [None] * row["cards"]
        assert row["balance"] is None
        assert row["spread"][0] <= row["samples_per_s"] <= row["spread"][1]
        assert row["first_step_s"] > 0.5, "importing PyTorch alone takes longer"
        assert row["joules_per_sample"] is None
    assert rows[0]["speedup"] == 1.0
    assert rows[1]["efficiency"] == pytest.approx(rows[1]["samples_per_s"] / rows[0]["samples_per_s"] / 2)
    assert listener.progress[-1][0] == len(rows[-1]["losses"])


def made_up(spec: RowSpec, on_progress: Callable[[int, int], None], time_limit: float, *more: object) -> Measurement:
    """A row's result without running it: `dp` fails on 4 cards."""
    on_progress(1, 1)
    if (spec.strategy, len(spec.card_names)) == ("dp", 4):
        return spec.measurement(error="out of memory: no")
    losses = (1.0 / (spec.batch or 1),)
    return spec.measurement(samples_per_s=1000.0, step_ms=1.0, losses=losses, final_loss=losses[0], repeats=1)


def test_rounds_are_interleaved_and_a_failed_row_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manycard.benchmark.rounds.run_row", made_up)
    listener = Listener()
    settings = simulated(4, counts=(2, 4), strategies=("single", "dp"), repeats=2)
    document = run_matrix(settings, listener)
    assert listener.labels == [
        "mlp single on 1 card 1/2",
        "mlp dp on 2 cards 1/2",
        "mlp dp on 4 cards 1/2",
        "mlp single on 1 card 2/2",
        "mlp dp on 2 cards 2/2",
    ]
    assert [len(document["rows"]) for document in listener.documents] == [1, 2, 3, 3, 3]
    assert [(row["repeats"], row["error"]) for row in document["rows"]] == [
        (2, None),
        (2, None),
        (0, "out of memory: no"),
    ]


def test_weak_scaling_compares_no_losses_of_different_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manycard.benchmark.rounds.run_row", made_up)
    settings = simulated(per_card_batch=4, strategies=("single", "dp"), counts=(1, 2))
    rows = run_matrix(settings, Listener())["rows"]
    assert [(row["cards"], row["batch"], row["largest_loss_difference"]) for row in rows] == [
        (1, 4, 0.0),
        (1, 4, 0.0),
        (2, 8, None),
    ]
    assert {row["scaling"] for row in rows} == {"weak"}


def test_an_interrupt_keeps_the_rows_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manycard.benchmark.rounds.run_row", made_up)
    document = run_matrix(simulated(strategies=("single", "dp")), Listener(interrupt_at=2))
    assert [row["strategy"] for row in document["rows"]] == ["single"]
    assert document["interrupted"]


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_an_interrupt_leaves_no_process(strategy: str) -> None:
    before = running_children()
    document = run_matrix(simulated(steps=1_000_000, strategies=(strategy,)), Listener(interrupt_at=1))
    assert (document["rows"], document["interrupted"]) == ([], True)
    assert running_children() <= before


def test_running_out_of_memory_is_a_row() -> None:
    (spec,) = matrix_rows(simulated(batch=10**13, strategies=("single",)))
    row = run_row(spec)
    assert row.error is not None
    assert row.error.startswith("out of memory: ")
    assert row.samples_per_s is None


def test_a_process_that_is_killed_is_a_row_that_says_so() -> None:
    (spec,) = matrix_rows(simulated(strategies=("single",), steps=1_000_000))

    before = running_children()

    def kill(done: int, total: int) -> None:
        for child in running_children() - before:
            child.kill()

    row = run_row(spec, kill)
    assert row.error is not None
    assert "SIGKILL" in row.error


def test_channels_last_replicas_can_be_compared() -> None:
    (spec,) = matrix_rows(simulated(workloads=("resnet18-cifar",), strategies=("dp",), steps=1, batch=8))
    assert run_row(spec).error is None


def test_a_manual_row_trains_the_same_and_has_each_cards_share() -> None:
    (spec,) = matrix_rows(simulated(strategies=("manual",), batch=9))
    parallel = Parallel(strategy="manual", cards=spec.cards, seed=spec.seed)
    row = measure(spec, parallel, time.time())
    parallel.close()
    assert row.shares is not None
    assert len(row.shares) == 2
    assert sum(row.shares) == pytest.approx(1)
    assert row.losses == pytest.approx(plain_losses(9, len(row.losses)), rel=1e-5)


@pytest.mark.parametrize(
    ("axes", "timeline"),
    [
        ({"replicas": 2}, {"micro_batches": 8, "schedule": "1f1b", "stages": 2}),
        ({"micro_batches": 3, "schedule": "gpipe"}, {"micro_batches": 3, "schedule": "gpipe", "stages": 4}),
        ({"replicas": 4, "checkpoint_activations": True}, {"micro_batches": 4, "schedule": "1f1b", "stages": 1}),
    ],
)
def test_a_pipelines_row_is_what_its_settings_say_and_trains_the_same(
    axes: dict[str, Any], timeline: dict[str, Any]
) -> None:
    given = tuple((name, (value,)) for name, value in axes.items())
    (spec,) = matrix_rows(simulated(4, strategies=("pipeline",), batch=32, axes=given))
    row = pipeline_row(spec)
    assert row.losses == pytest.approx(plain_losses(32, len(row.losses)), rel=1e-5)
    assert row.timeline is not None
    assert {**row.timeline, "stages": len(row.timeline["stages"])}.items() >= timeline.items()
    assert len(row.timeline["busy_seconds"]) == 4


def test_a_pipelines_row_has_the_precision_and_accumulation_that_were_set() -> None:
    def losses(strategy: str, precision: str, accumulate: int) -> list[float | None]:
        axes = (("precision", (precision,)), ("accumulate", (accumulate,)))
        (spec,) = matrix_rows(simulated(strategies=(strategy,), batch=8, axes=axes))
        if strategy == "pipeline":
            return list(pipeline_row(spec).losses[:6])
        parallel = make_parallel(spec)
        row = measure(spec, parallel, time.time())
        parallel.close()
        return list(row.losses[:6])

    found = losses("pipeline", "bf16", 2)
    assert found == pytest.approx(losses("single", "bf16", 2), rel=1e-4)
    assert found != pytest.approx(losses("pipeline", "bf16", 1), rel=1e-3)
    assert found != pytest.approx(losses("pipeline", "default", 2), rel=1e-6)


def pipeline_row(spec: RowSpec) -> Measurement:
    pipeline = PipelineRun(spec)
    try:
        return measure(spec, pipeline, time.time(), timeline=pipeline.timeline)
    finally:
        pipeline.close()


def test_cards_that_cannot_be_shared_out_to_replicas_make_no_row() -> None:
    axes = (("replicas", (1, 2)),)
    settings = simulated(4, strategies=("dp", "pipeline"), counts=(1, 3, 4), axes=axes)
    rows = [(row.strategy, row.cards, dict(row.settings)) for row in matrix_rows(settings)]
    pipelines = [(cards, found["replicas"]) for strategy, cards, found in rows if strategy == "pipeline"]
    assert pipelines == [("cpu:1", 1), ("cpu:3", 1), ("cpu:4", 1), ("cpu:4", 2)]
    assert any("can't be shared out" in note for note in matrix_notes(settings))


def test_a_pipeline_is_a_row_with_a_timeline() -> None:
    document = run_matrix(simulated(strategies=("single", "pipeline"), batch=8), Listener())
    single, pipeline = document["rows"]
    assert pipeline["error"] is None
    assert pipeline["largest_loss_difference"] < 1e-5
    assert single["timeline"] is None
    assert pipeline["timeline"]["cards"] == ["cpu:0", "cpu:1"]
    assert 0 < pipeline["timeline"]["bubble"] < 1
    assert any("pipeline" in note for note in document["notes"])
