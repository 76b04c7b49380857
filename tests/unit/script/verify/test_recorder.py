"""What a recorder sees of training loops of every shape, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import manycard as mc
from manycard.script.calls import Interception
from manycard.script.verify.recorder import RecordedEnough, Recorder, RecordingHandler
from manycard.script.verify.recording import Recording
from manycard.script.verify.samples import rows_of, same_rows
from manycard.script.verify.standing_in import watching


def _record(script: Callable[[], Any], steps: int = 20, budget: int = 2**20, **settings: Any) -> Recording:
    """The recording of `script`, which is a function here."""
    recorder = Recorder(steps, budget)
    ended = "script"
    with Interception(RecordingHandler(recorder)), watching(recorder, on_manycard=lambda: None, **settings):
        try:
            script()
        except RecordedEnough:
            ended = "steps"
    return recorder.recording(ended=ended)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


X = torch.arange(24.0).reshape(8, 3) / 24


def test_a_step_holds_what_led_to_it() -> None:
    net = _net()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    gradients: list[Tensor] = []

    def script() -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        for part in X.chunk(2):
            net(part).mean().backward()
        gradients.extend(parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None)
        optimizer.step()

    made = _record(script)
    (step,) = made.steps
    with torch.no_grad():
        for parameter, start, gradient in zip(net.parameters(), before, gradients, strict=True):
            torch.testing.assert_close(parameter, start - 0.5 * gradient)
    assert len(step.losses) == 2
    assert step.rates == (0.5,)
    assert made.optimizers[0].names == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert made.optimizers[0].kind == "SGD"
    for kept, gradient in zip(step.gradients, gradients, strict=True):
        assert kept is not None
        assert torch.equal(kept, gradient.flatten())
    for kept, start, end in zip(step.parameters, before, net.parameters(), strict=True):
        assert torch.equal(kept, end.flatten())
        assert not torch.equal(kept, start.flatten())
    assert all(torch.equal(kept, start.flatten()) for kept, start in zip(step.before, before, strict=True))
    assert [call.module for call in step.calls] == ["Sequential", "Sequential"]
    assert same_rows(step.calls[1].rows, rows_of(X[4:]), ordered=True)
    assert step.backward_at.split(":")[0].endswith("test_recorder.py")
    assert int(step.step_at.split(":")[1]) == int(step.backward_at.split(":")[1]) + 2
    assert (made.draws, made.batchnorm, made.precision) == (False, (), "single")


def test_it_ends_the_script_after_the_steps_asked_for_and_leaves_pytorch_as_it_was() -> None:
    standing = (torch.autograd.backward, nn.Module.__call__, DataLoader.__iter__, torch.optim.Optimizer.__init__)
    done: list[int] = []

    def script() -> None:
        net = _net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for number in range(10):
            try:
                net(X).mean().backward()
                optimizer.step()
            except Exception:  # it is none of these
                continue
            done.append(number)

    made = _record(script, steps=3)
    assert made.ended == "steps"
    assert len(made.steps) == 3
    assert done == [0, 1]
    assert standing == (
        torch.autograd.backward,
        nn.Module.__call__,
        DataLoader.__iter__,
        torch.optim.Optimizer.__init__,
    )


def test_a_closure_makes_its_gradients_inside_the_step() -> None:
    net = _net()

    def script() -> None:
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = net(X).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)

    made = _record(script)
    (step,) = made.steps
    assert len(step.losses) >= 2
    assert all(gradient is not None for gradient in step.gradients)


def test_a_shared_out_optimizer_is_recorded_whole() -> None:
    def script(shard: bool) -> None:
        parallel = mc.Parallel("dp", cards="cpu:2", shard_optimizer=shard)
        net = _net()
        model, optimizer = parallel.setup(net, torch.optim.Adam(net.parameters(), 0.1))
        step = parallel.train_step(lambda model, x: model(x).square().mean(), model, optimizer)
        for _ in range(3):
            step(X)
        parallel.close()

    mirrored, shared = _record(lambda: script(False)), _record(lambda: script(True))
    assert len(shared.steps) == len(mirrored.steps) == 3
    assert len(shared.optimizers) == 1
    for one, other in zip(mirrored.steps, shared.steps, strict=True):
        torch.testing.assert_close(list(other.gradients), list(one.gradients), rtol=0, atol=0)
        torch.testing.assert_close(list(other.parameters), list(one.parameters), rtol=0, atol=0)


def test_a_pipeline_is_compared_with_its_model_on_one_card() -> None:
    def script() -> None:
        net = _net()
        pipeline = mc.Pipeline(net, "cpu:4", stages=["2"], replicas=2, micro_batches=2)
        step = pipeline.train_step(lambda model, x: model(x).square().mean(), torch.optim.SGD(net.parameters(), 0.1))
        step(X)
        pipeline.close()

    def plain() -> None:
        net = _net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        net(X).square().mean().backward()
        optimizer.step()

    many, one, known = _record(script), _record(script, one_card=True), _record(plain)
    assert (many.uses_manycard, len(many.cards), len(one.cards)) == (True, 4, 1)
    for found in (many, one):
        torch.testing.assert_close(list(found.steps[0].gradients), list(known.steps[0].gradients))
        torch.testing.assert_close(list(found.steps[0].parameters), list(known.steps[0].parameters))
    assert all(torch.equal(a, b) for a, b in zip(one.steps[0].parameters, known.steps[0].parameters, strict=True))


def test_a_step_inside_a_step_is_none_of_its_own() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()

    class Around(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.25})
            self.inner = Twice(self.param_groups, lr=0.1)

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.inner.step()

    def script() -> None:
        net = _net()
        for kind in (Around, lambda parameters: Twice(parameters, lr=0.1)):
            optimizer = kind(list(net.parameters()))
            net(X).mean().backward()
            optimizer.step()

    made = _record(script)
    assert [optimizer.kind for optimizer in made.optimizers] == ["Around", "Twice"]
    assert len(made.steps) == 2


def test_without_an_optimizer_each_backward_pass_is_a_step() -> None:
    def script() -> None:
        net = _net()
        for _ in range(3):
            net(X).mean().backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= 0.1 * parameter.grad if parameter.grad is not None else 0
                    parameter.grad = None

    made = _record(script)
    assert len(made.steps) == 3
    assert made.optimizers[0].names == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert not torch.equal(made.steps[0].parameters[0], made.steps[1].parameters[0])


def test_parameters_are_named_by_the_modules_called() -> None:
    encoder, first, second = nn.Conv1d(1, 2, 3), nn.Linear(2, 1), nn.Linear(2, 1)
    loose = nn.Parameter(torch.ones(1))

    def script() -> None:
        optimizer = torch.optim.SGD([*encoder.parameters(), *second.parameters(), loose], lr=0.1)
        optimizer.add_param_group({"params": list(first.parameters())})
        features = encoder(X[:, None]).squeeze(-1)
        (first(features).mean() + second(features).mean() * loose).backward()
        optimizer.step()

    made = _record(script)
    assert made.optimizers[0].names == (
        "Conv1d.weight",
        "Conv1d.bias",
        "Linear#2.weight",
        "Linear#2.bias",
        "group 0, parameter 4",
        "Linear#1.weight",
        "Linear#1.bias",
    )


@pytest.mark.parametrize("unscales", [False, True])
def test_clipping_while_a_loss_scale_is_in_the_gradients(unscales: bool) -> None:
    def script() -> None:
        net = _net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for _ in range(2):
            scaler.scale(net(X).mean()).backward()  # type: ignore[no-untyped-call]
            if unscales:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

    made = _record(script)
    assert [step.scaled_clip for step in made.steps] == [not unscales] * 2


def test_draws_batchnorm_and_precision_are_noted() -> None:
    def train(net: nn.Module, dtype: torch.dtype = torch.float32) -> Recording:
        def script() -> None:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            net(X.to(dtype)).mean().backward()
            optimizer.step()

        return _record(script)

    assert train(nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5))).draws
    assert not train(nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.0))).draws
    assert train(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))).batchnorm == ("Sequential",)
    assert train(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2).eval())).batchnorm == ()
    assert train(nn.Linear(3, 1).double(), torch.float64).precision == "double"
    assert train(nn.Linear(3, 1).bfloat16(), torch.bfloat16).precision == "half"


def test_checkpoints_and_evaluation_are_no_part_of_a_step() -> None:
    net = _net()

    def script() -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            out = torch.utils.checkpoint.checkpoint(net, X.clone().requires_grad_(), use_reentrant=True) + net(X)
            out.mean().backward()
            optimizer.step()
            with torch.no_grad():
                net(X)

    made = _record(script)
    assert [len(step.losses) for step in made.steps] == [1, 1]
    assert len(made.steps[1].calls) == len(made.steps[0].calls)


def test_beyond_the_budget_sketches_are_kept() -> None:
    def script() -> None:
        net = nn.Linear(100, 100)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(4, 100)).mean().backward()
        optimizer.step()

    assert not _record(script, budget=2**22).sketched
    made = _record(script, budget=1000)
    assert made.sketched
    assert made.steps[0].parameters[0].shape == (4096,)


@pytest.mark.parametrize("drop_last", [False, True])
def test_one_rank_gets_what_all_ranks_get_together(drop_last: bool) -> None:
    data = TensorDataset(torch.arange(23))

    def loader(ranks: int, rank: int) -> DataLoader[Any]:
        sampler: Any = DistributedSampler(data, ranks, rank, drop_last=drop_last)
        return DataLoader(data, batch_size=4, sampler=sampler, drop_last=drop_last)

    apart = [[batch.tolist() for (batch,) in loader(3, rank)] for rank in range(3)]
    original = BatchSampler.__init__
    with watching(Recorder(1, 0), on_manycard=lambda: None, ranks=3):
        together = [batch.tolist() for (batch,) in loader(1, 0)]
        plain = [batch.tolist() for (batch,) in DataLoader(data, batch_size=4)]
    assert BatchSampler.__init__ is original
    assert [sorted(batch) for batch in together] == [
        sorted(row for batch in batches for row in batch) for batches in zip(*apart, strict=True)
    ]
    assert [len(batch) for batch in plain] == [4, 4, 4, 4, 4, 3]
