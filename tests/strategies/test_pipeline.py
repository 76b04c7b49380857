"""Pipelines train as plain PyTorch on one card: stages, micro-batches, schedules, replicas and what crosses stages."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import manycard as mc

from .pipelined import LENGTH, WORDS, Language, batches, compare, loss_fn, made, pipelined, sgd, train_alone

NAMES = {2: ["blocks.2"], 3: ["blocks.1", "blocks.3"], 4: ["blocks.1", "blocks.2", "norm"]}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
@pytest.mark.parametrize("cards", [2, 3, 4])
def test_training_is_that_of_one_card(cards: int, micro_batches: int, schedule: str) -> None:
    """With tied weights, a skip over all stages, accumulation, clipping, and batches that don't divide evenly."""
    compare(
        made(),
        batches(9, 8, 9, 5, 3),
        cards=f"cpu:{cards}",
        stages=NAMES[cards],
        micro_batches=micro_batches,
        schedule=schedule,
        accumulate=2,
        clip_norm=0.5,
    )


@pytest.mark.parametrize("cards", [1, 2, 3, 4])
def test_stages_found_by_measuring_train_as_well(cards: int) -> None:
    compare(made(), batches(8, 8, 5), cards=f"cpu:{cards}")


@pytest.mark.parametrize(
    "settings", [{"stages": ["blocks"]}, {}, {"schedule": "gpipe", "checkpoint_activations": True}]
)
def test_replicas_beside_stages(settings: dict[str, Any]) -> None:
    """2 x 2 cards; the last batches have fewer samples than there are micro-batches, and than replicas."""
    compare(made(), batches(12, 11, 3, 1), cards="cpu:4", replicas=2, micro_batches=3, clip_norm=0.5, **settings)


def test_replicas_with_accumulation_and_frozen_parameters() -> None:
    model = made()
    model.blocks[1].requires_grad_(False)
    compare(
        model,
        batches(12, 1, 9, 2, 8),
        cards="cpu:4",
        replicas=2,
        stages=["blocks.2"],
        micro_batches=2,
        accumulate=2,
        clip_norm=0.5,
    )


def test_replicas_follow_what_the_script_changes() -> None:
    model = made()
    optimizer = sgd(model)
    (ids,) = batches(8)
    with pipelined(model, "cpu:4", stages=["blocks.2"], replicas=2, micro_batches=2) as pipeline:
        step = pipeline.train_step(loss_fn, optimizer)
        step(ids)
        with torch.no_grad():
            model.head.weight.data.mul_(0.5)
            model.blocks[3] = copy.deepcopy(model.blocks[0])
        expected = loss_fn(copy.deepcopy(model), ids).item()
        assert step(ids).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("in_place", [True, False])
def test_blocks_may_be_compiled(in_place: bool) -> None:
    model = made()
    alone = copy.deepcopy(model)
    for index, block in enumerate(model.blocks):
        if in_place:
            block.compile(backend="eager")
        else:
            model.blocks[index] = torch.compile(block, backend="eager")
    data = batches(8, 7)
    expected = train_alone(alone, data)
    optimizer = sgd(model)
    with pipelined(model, "cpu:2", stages=NAMES[2], micro_batches=4) as pipeline:
        step = pipeline.train_step(loss_fn, optimizer)
        assert [step(batch).item() for batch in data] == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
        lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
    ],
    ids=["adamw", "rmsprop", "adagrad", "fused"],
)
def test_optimizers(make: Any) -> None:
    compare(made(), batches(8, 7), make, cards="cpu:3", stages=NAMES[3], micro_batches=4, tolerance=2e-5)


def test_frozen_stages_and_parameters() -> None:
    model = made()
    model.blocks[0].requires_grad_(False)
    model.blocks[3].up.requires_grad_(False)
    model.words.requires_grad_(False)
    model.places.requires_grad_(False)
    compare(model, batches(8, 7), cards="cpu:3", stages=NAMES[3], micro_batches=2)


def test_activation_checkpointing_changes_nothing_but_memory() -> None:
    compare(made(), batches(8, 7), cards="cpu:2", stages=NAMES[2], micro_batches=4, checkpoint_activations=True)


def test_a_nested_sequential_is_cut_inside() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    alone = nn.Sequential(nn.Linear(5, 8), inner, nn.Linear(8, 2))
    spread = copy.deepcopy(alone)
    mine, theirs = sgd(alone), sgd(spread)
    x = torch.randn(7, 5)
    with pipelined(spread, "cpu:3", stages=["1.1", "1.2.1"], micro_batches=3) as pipeline:
        step = pipeline.train_step(lambda model, x: model(x).square().mean(), theirs)
        for _ in range(4):
            mine.zero_grad()
            loss = alone(x).square().mean()
            loss.backward()
            mine.step()
            torch.testing.assert_close(step(x), loss.detach())
        assert pipeline.stages == ["0 to 1.0", "1.1 to 1.2.0", "1.2.1 to 2"]
    for one, other in zip(alone.parameters(), spread.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_each_stage_has_a_graph_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backward pass of a stage reaches a parameter of another: on real cards that would deadlock."""
    model = made()
    with pipelined(model, "cpu:3", stages=NAMES[3], micro_batches=2) as pipeline:
        step = pipeline.train_step(loss_fn, sgd(model), check_loss=False)
        step(batches(4)[0])
        (chain,) = pipeline._strategy.engine._chains
        found: list[set[int]] = []
        backward = torch.autograd.backward

        def looked_at(roots: Any, *args: Any) -> None:
            found.append({chain.home_of[key] for key in _leaves(roots) if key in chain.home_of})
            backward(roots, *args)

        monkeypatch.setattr(torch.autograd, "backward", looked_at)
        step(batches(4)[0])
    assert sorted(found, key=min) == [{0}, {0}, {1}, {1}, {2}, {2}]


def _leaves(roots: Any) -> set[int]:
    waiting, seen, leaves = [root.grad_fn for root in roots], set(), set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        waiting += [following for following, _ in node.next_functions]
    return leaves


class Kept:
    """A tensor that a graph keeps for its backward pass."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


class Counted(nn.Module):
    """A layer that notes how many of its activations are held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.held: weakref.WeakSet[Kept] = weakref.WeakSet()
        self.most = 0

    def forward(self, x: Any) -> Any:
        def keep(tensor: Any) -> Kept:
            kept = Kept(tensor)
            self.held.add(kept)
            self.most = max(self.most, len(self.held))
            return kept

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
            return torch.exp(self.layer(x))


@pytest.mark.parametrize(("schedule", "held"), [("gpipe", (6, 6, 6)), ("1f1b", (3, 2, 1))])
def test_activations_are_held_for_as_many_micro_batches_as_the_schedule_says(
    schedule: str, held: tuple[int, ...]
) -> None:
    model = nn.Sequential(Counted(), Counted(), Counted())
    with pipelined(model, "cpu:3", stages=["1", "2"], micro_batches=6, schedule=schedule) as pipeline:
        step = pipeline.train_step(lambda model, x: model(x).square().mean(), sgd(model), check_loss=False)
        step(torch.ones(1, 4))
        one = [part.most for part in model]
        for part in model:
            part.most = 0
        timeline = pipeline.record(step, torch.ones(12, 4))
        gc.collect()
        assert tuple(part.most / each for part, each in zip(model, one, strict=True)) == held == timeline.in_flight
        assert [len(part.held) for part in model] == [0, 0, 0]


def test_the_model_is_the_scripts_own_between_steps() -> None:
    model = made()
    before = {name: set(part.__dict__) for name, part in model.named_modules()}
    parameters = list(model.parameters())
    with pipelined(model, "cpu:2", stages=NAMES[2]) as pipeline:
        step = pipeline.train_step(loss_fn, sgd(model))
        step(batches(8)[0])
        assert {name: set(part.__dict__) for name, part in model.named_modules()} == before
        assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
        assert list(pipeline.state_dict()) == list(made().state_dict())
        copy.deepcopy(model)(batches(2)[0])


def test_the_check_of_the_loss_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.LSTM(4, 4, 2, dropout=0.5))
    model.append(nn.Linear(4, 2))
    model[1].eval()

    def loss(model: Any, x: Any) -> Any:
        return model[3](model[2](model[1](model[0](x)).unsqueeze(0))[0]).square().mean()

    with pipelined(model, "cpu:2", stages=["2"], micro_batches=2) as pipeline:
        pipeline.train_step(loss, sgd(model))(torch.randn(8, 4))
    assert (model[1].running_mean, model[2].dropout, model[1].training, model[2].training) == (None, 0.5, False, True)


def test_outputs_and_metrics() -> None:
    model = made()
    alone = copy.deepcopy(model).eval()
    ids = batches(7)[0]
    with pipelined(model, "cpu:3", stages=NAMES[3], micro_batches=3) as pipeline:
        with pytest.raises(mc.errors.ModelError, match="without gradients"):
            pipeline(ids)
        pipeline.eval()
        torch.testing.assert_close(pipeline(ids), alone(ids).detach())
        torch.testing.assert_close(pipeline(ids=ids), alone(ids).detach())

        def metric_fn(model: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
            (ids,) = batch
            right = model(ids).argmax(2) == ids
            return {"accuracy": (right.sum(), right.numel())}

        data = torch.utils.data.TensorDataset(*[torch.cat(batches(7, 4))])
        found = pipeline.evaluate(metric_fn, torch.utils.data.DataLoader(data, 4))
        whole = torch.cat(batches(7, 4))
        assert found["accuracy"] == pytest.approx((alone(whole).argmax(2) == whole).float().mean().item())


def test_a_checkpoint_goes_on_on_one_card_and_back(tmp_path: Any) -> None:
    data = batches(8, 8, 8)
    alone = made()
    expected = made()
    compare_to = sgd(expected)
    for batch in data:
        compare_to.zero_grad()
        loss_fn(expected, batch).backward()
        compare_to.step()
    model = made()
    optimizer = sgd(model)
    with pipelined(model, "cpu:2", stages=NAMES[2], micro_batches=2) as pipeline:
        step = pipeline.train_step(loss_fn, optimizer)
        step(data[0])
        pipeline.save(tmp_path / "a.ckpt", optimizer=optimizer, epoch=1)
    parallel = mc.Parallel("single", cards="cpu:1")
    alone, mine = parallel.setup(alone, sgd(alone))
    assert parallel.load(tmp_path / "a.ckpt", model=alone, optimizer=mine) == {"epoch": 1}
    parallel.train_step(loss_fn, alone, mine)(data[1])
    parallel.save(tmp_path / "b.ckpt", model=alone, optimizer=mine)
    parallel.close()
    again = made(seed=5)
    theirs = sgd(again)
    with pipelined(again, "cpu:3", micro_batches=2) as pipeline:
        pipeline.load(tmp_path / "b.ckpt", optimizer=theirs)
        pipeline.train_step(loss_fn, theirs)(data[2])
    for one, other in zip(expected.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=2e-6, atol=2e-6)


def test_bf16_computes_as_autocast_on_one_card() -> None:
    model = made()
    alone = copy.deepcopy(model)
    ids = batches(8)[0]
    with torch.autocast("cpu", torch.bfloat16):
        expected = loss_fn(alone, ids)
    expected.backward()
    with pipelined(model, "cpu:2", stages=NAMES[2], micro_batches=1, precision="bf16") as pipeline:
        step = pipeline.train_step(loss_fn, sgd(model), check_loss=False)
        torch.testing.assert_close(step(ids), expected.detach().float(), rtol=1e-6, atol=1e-6)
    for one, other in zip(alone.parameters(), model.parameters(), strict=True):
        # The tied weight's gradient is added up in fp32 here, and in another order.
        torch.testing.assert_close(other.grad, one.grad, rtol=2e-2, atol=1e-4)


def test_fp16_scales_the_loss_and_skips_what_overflows() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    alone = copy.deepcopy(model)
    x = torch.randn(8, 4)
    alone(x).square().mean().backward()
    factor = [1.0]
    with pipelined(model, "cpu:2", stages=["2"], micro_batches=2, precision="fp16") as pipeline:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = pipeline.train_step(
            lambda model, x: model(x).square().mean() * factor[0], optimizer, clip_norm=10.0, check_loss=False
        )
        step(x)
        assert step.updated
        for one, other in zip(alone.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad, rtol=2e-2, atol=1e-3)
        scale, before = pipeline.precision.scale.value, copy.deepcopy(model.state_dict())
        factor[0] = 1e38
        step(x)
        assert not step.updated
        assert pipeline.precision.scale.value == scale / 2
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_micro_batches_share_the_casts_of_weights() -> None:
    """Autocast casts a weight once a batch, not once a micro-batch, and the gradient is the same."""
    model = made()
    alone = copy.deepcopy(model)
    ids = batches(8)[0]
    for part in ids.split(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_fn(alone, part) / 4
        loss.backward()
    casts: list[tuple[int, ...]] = []

    class Casts(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16:
                casts.append(tuple(out.shape))
            return out

    with pipelined(model, "cpu:2", stages=NAMES[2], micro_batches=4, precision="bf16") as pipeline:
        step = pipeline.train_step(loss_fn, torch.optim.SGD(model.parameters(), lr=0.0), check_loss=False)
        step(ids)
        with Casts():
            step(ids)
    for one, other in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=2e-2, atol=1e-4)
    weights = [shape for shape in casts if shape == tuple(model.blocks[0].up.weight.shape)]
    assert len(weights) == len(model.blocks)


def test_dropout_repeats_from_a_seed_and_differs_between_micro_batches() -> None:
    def run() -> tuple[list[float], list[Any]]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 2))
        seen: list[Any] = []
        model[3].register_forward_hook(lambda module, args, out: seen.append(out.detach() == 0))
        with pipelined(model, "cpu:2", stages=["3"], micro_batches=2) as pipeline:
            step = pipeline.train_step(lambda model, x: model(x).square().mean(), sgd(model), check_loss=False)
            losses = [step(torch.ones(4, 4)).item() for _ in range(3)]
        return losses, seen[-2:]

    (losses, seen), (again, _) = run(), run()
    assert losses == again
    assert not torch.equal(seen[0], seen[1])


def test_one_layer_more_than_the_pipeline_needs_to_know() -> None:
    """Keyword arguments, dicts and lists between the stages, a mask made outside of all parts, and other lengths."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)

        def forward(self, x: Any, *, scale: float = 1.0) -> Any:
            mask = (x > 0).any(1, keepdim=True)
            state = {"x": self.first(x), "kept": [mask]}
            return self.last(state=state, scale=scale)

        def last(self, state: Any, scale: float) -> Any:
            return self.second(state["x"] * state["kept"][0]) * scale + state["x"]

    torch.manual_seed(0)
    alone = Masked()
    spread = copy.deepcopy(alone)
    x = torch.randn(6, 3)

    def loss(model: Any, x: Any) -> Any:
        return model(x, scale=0.5).square().mean()

    loss(alone, x).backward()
    with pipelined(spread, "cpu:2", stages=["second"], micro_batches=3) as pipeline:
        pipeline.train_step(loss, sgd(spread))(x)
    for one, other in zip(alone.parameters(), spread.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)


def test_lengths_may_differ_from_batch_to_batch() -> None:
    model = Language()
    alone = copy.deepcopy(model)
    optimizer, mine = sgd(model), sgd(alone)
    with pipelined(model, "cpu:2", stages=NAMES[2], micro_batches=2) as pipeline:
        step = pipeline.train_step(loss_fn, optimizer)
        for length in (LENGTH, 3, 5):
            ids = torch.randint(0, WORDS, (4, length))
            mine.zero_grad()
            loss = loss_fn(alone, ids)
            loss.backward()
            mine.step()
            torch.testing.assert_close(step(ids), loss.detach(), rtol=2e-6, atol=2e-6)
