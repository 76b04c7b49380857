"""What a pipeline refuses, and what it is like after a failure."""

from __future__ import annotations

import _thread
import copy
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import manycard as mc

from .pipelined import batches, loss_fn, made, pipelined, sgd, train_alone

# ---- failures in the middle of a step --------------------------------------------------------------------------


class Tripping(nn.Module):
    """Fails in its `at`-th forward pass, or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)
        self.calls, self.at = 0, -1
        self.in_backward = False
        self.act: Any = None

    def forward(self, x: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            if self.in_backward:
                return _FailsBackward.apply(self.layer(x))
            self.act()
        return self.layer(x)


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ArithmeticError("planted in backward")


def tripping() -> nn.Module:
    model = made()
    model.blocks[2] = Tripping()
    return model


def planted() -> None:
    raise ArithmeticError("planted in forward")


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_an_exception_names_card_and_stage_and_the_next_step_works(in_backward: bool, replicas: int) -> None:
    model = tripping()
    alone = copy.deepcopy(model)
    data = batches(8, 8, 8)
    expected = train_alone(alone, data)
    with pipelined(
        model, f"cpu:{3 * replicas}", stages=["blocks.1", "blocks.2"], micro_batches=4, replicas=replicas
    ) as pipeline:
        step = pipeline.train_step(loss_fn, sgd(model))
        losses = [step(data[0]).item()]
        fails = model.blocks[2]
        fails.act, fails.in_backward, fails.at = planted, in_backward, fails.calls + (3 if replicas == 1 else 2)
        with pytest.raises(ArithmeticError, match="planted") as caught:
            step(data[1])
        shown = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        way = "backward" if in_backward else "forward"
        assert f"in stage 2 (blocks.2 to head), {way} of micro-batch" in shown
        assert "raised on card 2 (cpu:2)" in shown
        assert "forward" not in model.blocks[0].__dict__
        losses += [step(batch).item() for batch in data[1:]]
    assert losses == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize(
    "press", [_thread.interrupt_main, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)]
)
def test_ctrl_c_ends_the_step_and_the_next_one_works(press: Any) -> None:
    model = tripping()
    data = batches(8, 8)
    alone = copy.deepcopy(model)
    expected = train_alone(alone, data)
    reached = threading.Event()

    def interrupt() -> None:
        press()
        reached.set()
        time.sleep(0.2)

    with pipelined(model, "cpu:2", stages=["blocks.2"], micro_batches=8, schedule="gpipe") as pipeline:
        step = pipeline.train_step(loss_fn, sgd(model))
        losses = [step(data[0]).item()]
        part = model.blocks[2]
        part.act, part.at = interrupt, part.calls + 2
        with pytest.raises(KeyboardInterrupt):
            step(data[1])
        assert reached.is_set()
        losses.append(step(data[1]).item())
        assert part.calls < 40
    assert losses == pytest.approx(expected, rel=2e-6)


def test_a_dropped_pipeline_leaves_no_thread() -> None:
    model = made()
    pipeline = mc.Pipeline(model, "cpu:2", stages=["blocks.2"], micro_batches=2)
    pipeline.train_step(loss_fn, sgd(model))(batches(4)[0])
    del pipeline  # the fixture of all tests looks for threads


# ---- what can't be cut -----------------------------------------------------------------------------------------


def refused(
    kind: type[Exception], match: str, model: nn.Module | None = None, batch: Any = None, **settings: Any
) -> None:
    """The first step, or making the pipeline, is refused in these words."""
    model = made() if model is None else model
    with pytest.raises(kind, match=match), pipelined(model, **settings) as pipeline:
        pipeline.train_step(loss_fn, sgd(model))(batches(4)[0] if batch is None else batch)


SETTING, MODEL = mc.errors.SettingError, mc.errors.ModelError


def test_names_that_no_stage_can_begin_with() -> None:
    refused(SETTING, "no module called 'block.2'.*did you mean blocks.2", cards="cpu:2", stages=["block.2"])
    refused(SETTING, "in the order blocks.1, blocks.3", cards="cpu:3", stages=["blocks.3", "blocks.1"])
    refused(SETTING, "in the order blocks.1, blocks.1", cards="cpu:3", stages=["blocks.1", "blocks.1"])
    refused(SETTING, "nothing would be left for the first card", cards="cpu:2", stages=["words"])
    model = made()
    model.extra = nn.Linear(2, 2)
    refused(SETTING, "forward never calls this module", model, cards="cpu:2", stages=["extra"])


def test_numbers_that_do_not_fit() -> None:
    refused(SETTING, "1 name for 2 stages, and there are 3 cards", cards="cpu:3", stages=["blocks.1"])
    refused(SETTING, "neither .auto. nor names", cards="cpu:2", stages="blocks.1")
    refused(SETTING, "neither .auto. nor names", cards="cpu:2", stages=5)
    refused(mc.errors.CardsError, "card 0 stands there more than once", cards=[0, 0])
    refused(SETTING, "micro_batches=0: it must be a whole number of at least 1", cards="cpu:2", micro_batches=0)
    refused(SETTING, "micro_batches=2.5", cards="cpu:2", micro_batches=2.5)
    refused(SETTING, "3 cards can't be shared out to 2 replicas", cards="cpu:3", replicas=2)
    refused(SETTING, "schedule='zb'", cards="cpu:2", schedule="zb")
    refused(SETTING, "schedule=.'1f1b'.", cards="cpu:2", schedule=["1f1b"])
    refused(SETTING, "there are 2 amounts for 3 stages", cards="cpu:3", memory=["1GiB", "2GiB"])
    refused(SETTING, "there is 1 amount for 2 stages", cards="cpu:2", memory=["1GiB"])
    for memory in (1e9, "much", [1, None], {"cpu:0": "1GiB"}):
        refused(mc.errors.CardsError, "it is no amount of memory", cards="cpu:2", memory=memory)
    refused(SETTING, "checkpoint_activations='no': it is neither True nor", cards="cpu:2", checkpoint_activations="no")
    refused(mc.errors.BatchError, "0 samples", cards="cpu:2", batch=torch.zeros(0, 6).long())


def test_more_stages_than_parts() -> None:
    model = nn.Sequential(nn.Embedding(29, 8), nn.Linear(8, 29))
    refused(MODEL, r"the model has 2 parts that can be cut apart \(0, 1\), too few for 3 stages", model, cards="cpu:3")


def test_a_stage_that_cannot_fit_is_refused_before_training() -> None:
    model = made()
    before = copy.deepcopy(model.state_dict())
    refused(
        MODEL,
        r"part words alone needs about 4 KiB, and no card has room for it \(cpu:1 has 1 KiB\). Fix: take more cards, a"
        r" larger micro_batches= or checkpoint_activations=True.",
        model,
        cards="cpu:2",
        memory="1KiB",
    )
    refused(
        MODEL,
        r"no way of cutting the model into 2 stages fits: it needs about \d+ KiB, and cpu:0 has 20 KiB, cpu:1 has"
        r' 6 KiB. Fix: take more cards, a larger micro_batches= or schedule="1f1b".',
        model,
        cards="cpu:2",
        memory=["20KiB", "6KiB"],
        schedule="gpipe",
        checkpoint_activations=True,
    )
    refused(
        MODEL,
        r"stage 1 \(blocks.2 to head\) needs about .* of parameters, gradients and optimizer state",
        model,
        cards="cpu:2",
        stages=["blocks.2"],
        memory=["1GiB", "2KiB"],
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_models_that_cannot_be_driven() -> None:
    refused(MODEL, "compiled as a whole", torch.compile(made(), backend="eager"), cards="cpu:2")
    refused(MODEL, "lazy parameters", nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)), cards="cpu:2")
    model = made()
    model.head.weight.register_hook(lambda gradient: gradient)
    refused(MODEL, "gradient hook", model, cards="cpu:2", stages=["blocks.2"])
    with pytest.raises(mc.errors.OptimizerError, match="no parameter of the model"), pipelined(made(), "cpu:2") as it:
        it.train_step(loss_fn, sgd(made()))
    with pytest.raises(mc.errors.OptimizerError, match="LBFGS"), pipelined(model, "cpu:2") as it:
        it.train_step(loss_fn, torch.optim.LBFGS(model.parameters()))


def test_models_that_spread_calls_by_themselves() -> None:
    refused(MODEL, "holds a DataParallel, which spreads its calls", mc.DataParallel(made(), "cpu:2"), cards="cpu:2")
    model = made()
    model.blocks[2] = nn.DataParallel(model.blocks[2])
    refused(MODEL, r"its attribute .module", model, cards="cpu:2")
    with pytest.raises(MODEL, match=r"the model is the class Language. Fix: pass one of its kind: Language\(...\)"):
        mc.Pipeline(type(made()), "cpu:2")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (None, "there is no optimizer"),
        ([], "there is no optimizer"),
        (torch.optim.SGD, "the optimizer is the class SGD, no torch.optim.Optimizer"),
        ({"lr": 0.1}, "the optimizer is a dict"),
    ],
)
def test_what_is_no_optimizer(optimizer: Any, words: str) -> None:
    model = made()
    with pipelined(model, "cpu:2") as pipeline, pytest.raises(mc.errors.OptimizerError, match=words):
        pipeline.train_step(loss_fn, optimizer)
    parallel = mc.Parallel("dp", cards="cpu:2")
    with pytest.raises(mc.errors.OptimizerError, match=words):
        parallel.train_step(loss_fn, parallel.setup(model), optimizer)
    parallel.close()


def test_what_is_recorded_is_a_step_of_this_pipeline() -> None:
    model = made()
    with pipelined(model, "cpu:2") as pipeline:
        step = pipeline.train_step(loss_fn, sgd(model))
        with pytest.raises(SETTING, match="step='Tensor': it is no train step of this pipeline"):
            pipeline.record(batches(4)[0], step)


def test_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(mc.errors.StrategyError, "drives all its cards from one process, and this script runs in 2 ranks")


def test_losses_that_are_no_mean() -> None:
    model = made()
    with pipelined(model, "cpu:2", stages=["blocks.2"], micro_batches=2) as pipeline:
        step = pipeline.train_step(lambda model, ids: model(ids).square().sum(), sgd(model))
        with pytest.raises(mc.errors.LossError, match=r"no mean over samples.*take micro_batches=1 and one replica"):
            step(batches(4)[0])
        step = pipeline.train_step(lambda model, ids: model(ids).detach().mean(), sgd(model))
        with pytest.raises(mc.errors.LossError, match="depends on no parameter"):
            step(batches(4)[0])


def test_a_loss_that_compares_samples_is_that_of_one_card_in_one_micro_batch() -> None:
    def spread_out(model: Any, ids: Any) -> Any:
        scores = model(ids).flatten(1)
        return torch.log_softmax(scores @ scores.T, 1).diagonal().sum()

    model = made()
    expected = spread_out(copy.deepcopy(model), batches(6)[0]).item()
    with pipelined(model, "cpu:2", stages=["blocks.2"], micro_batches=1) as pipeline:
        assert pipeline.train_step(spread_out, sgd(model))(batches(6)[0]).item() == pytest.approx(expected, rel=1e-5)


def test_writing_in_place_into_an_earlier_stages_tensor() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            kept = self.first(x)
            out = self.second(kept)
            kept += out
            return kept

    model = Adds()
    with pipelined(model, "cpu:2", stages=["second"], micro_batches=2) as pipeline:
        step = pipeline.train_step(lambda model, x: model(x).mean(), sgd(model))
        with pytest.raises(MODEL, match=r"in place \(add_\).*that an earlier stage made, in stage 1"):
            step(torch.ones(4, 3))
        pipeline.eval()
