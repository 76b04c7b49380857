"""shard_optimizer: the numbers of mirrored updates, a part of the state on each card, and whole state dicts."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import manycard as mc
from manycard.errors import OptimizerError, SettingError

Make = Callable[[Any], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01),
    "adamw, one by one": lambda parameters: torch.optim.AdamW(parameters, 0.01, foreach=False),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.05),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, 0.01, momentum=0.5, centered=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, 0.01),
}


class Net(nn.Module):
    """Shared, frozen and unused parameters, of many sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.frozen = nn.Linear(13, 13)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(13, 3)
        self.again = nn.Linear(13, 13)
        self.again.weight = self.frozen.weight
        self.scale = nn.Parameter(torch.ones(3))
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.again(self.frozen(torch.tanh(self.first(x)))))) * self.scale


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    return [(torch.randn(size, 7), torch.randn(size, 3)) for size in (12, 12, 5, 12, 2, 12, 12, 7)]


def loss_fn(model: Any, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def set_up(
    make: Make, cards: int, shard: bool, accumulate: int = 1, **settings: Any
) -> tuple[mc.Parallel, nn.Module, Optimizer, Any]:
    parallel = mc.Parallel("dp", cards=f"cpu:{cards}", shard_optimizer=shard, accumulate=accumulate, seed=0)
    net = Net().double()
    model, optimizer = parallel.setup(net, make([p for p in net.parameters() if p.requires_grad]))
    return parallel, net, optimizer, parallel.train_step(loss_fn, model, optimizer, **settings)


def double(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0].double(), batch[1].double()


def train(step: Any, some: list[tuple[Tensor, Tensor]]) -> list[float]:
    return [float(step(double(batch))) for batch in some]


def same_parameters(one: nn.Module, other: nn.Module) -> None:
    for (name, own), twin in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(own, twin), name


def held(parallel: mc.Parallel, model: nn.Module) -> list[int]:
    """Numbers of optimizer state on each card, counters left out."""
    (engine,) = [each.engine for each in parallel.strategy._models]  # type: ignore[attr-defined]
    (mirrors,) = engine.updates.mirrored.values()
    return [
        sum(value.numel() for state in each.state.values() for value in state.values() if value.dim())
        for each in mirrors.optimizers
    ]


@pytest.mark.parametrize("cards", [2, 3, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_numbers_are_those_of_mirrored_updates(name: str, cards: int) -> None:
    found = []
    for shard in (False, True):
        parallel, net, optimizer, step = set_up(OPTIMIZERS[name], cards, shard, clip_norm=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        losses = []
        for batch in batches():
            losses += train(step, [batch])
            scheduler.step()
        parallel.strategy.check_lockstep(next(iter(parallel.strategy._models)))  # type: ignore[attr-defined]
        found.append((losses, net, copy.deepcopy(optimizer.state_dict())))
        parallel.close()
    assert found[0][0] == found[1][0]
    same_parameters(found[0][1], found[1][1])
    mirrored, sharded = (each[2]["state"] for each in found)
    assert mirrored.keys() == sharded.keys()
    for number, state in mirrored.items():
        assert state.keys() == sharded[number].keys()
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(sharded[number][key])), (number, key)


@pytest.mark.parametrize("cards", [2, 4])
def test_each_card_keeps_its_part_of_the_state(cards: int) -> None:
    parallel, net, _, step = set_up(OPTIMIZERS["adamw"], cards, True)
    train(step, batches()[:2])
    used = [p for name, p in net.named_parameters() if p.requires_grad and not name.startswith("unused")]
    state = 2 * sum(p.numel() for p in used)
    largest = 2 * max(p.numel() for p in used)
    found = held(parallel, net)
    assert sum(found) == state
    assert max(found) <= state / cards + largest
    parallel.close()


def test_accumulation_and_two_groups() -> None:
    def make(parameters: Any) -> Optimizer:
        some = list(parameters)
        return torch.optim.AdamW([{"params": some[:3]}, {"params": some[3:], "lr": 0.1}], 0.01)

    nets = []
    for shard in (False, True):
        parallel, net, _, step = set_up(make, 3, shard, accumulate=3)
        train(step, batches())
        nets.append(net)
        parallel.close()
    same_parameters(*nets)


def test_a_resumed_run_goes_on_the_same(tmp_path: Path) -> None:
    parallel, whole, optimizer, step = set_up(OPTIMIZERS["adam"], 3, True)
    train(step, batches()[:4])
    parallel.save(tmp_path / "run.pt", model=whole, optimizer=optimizer)
    train(step, batches()[4:])
    parallel.close()
    for cards, shard in ((3, True), (2, True), (2, False)):
        parallel, net, optimizer, step = set_up(OPTIMIZERS["adam"], cards, shard)
        train(step, batches()[:1])
        parallel.load(tmp_path / "run.pt", model=net, optimizer=optimizer)
        train(step, batches()[4:])
        for own, twin in zip(whole.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(own, twin, rtol=1e-10, atol=1e-12)
        if shard:
            assert min(held(parallel, net)) > 0
        parallel.close()


def test_an_optimizer_that_steps_by_itself_has_all_state() -> None:
    nets = []
    for shard in (False, True):
        parallel, net, optimizer, step = set_up(OPTIMIZERS["adamw"], 3, shard)
        model = next(iter(parallel.strategy._models))  # type: ignore[attr-defined]
        for number, batch in enumerate(batches()):
            if number % 3 == 2:  # an ordinary step of the script's
                optimizer.zero_grad()
                parallel.backward(loss_fn(model, double(batch)))
                optimizer.step()
            else:
                train(step, [batch])
        nets.append(net)
        parallel.close()
    for own, twin in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(own, twin, rtol=1e-12, atol=1e-12)


class Joined(torch.optim.SGD):
    """Its step is as long as all gradients together say."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad / norm


@pytest.mark.parametrize("change", ["group", "layer"])
def test_state_outlives_copies_that_are_made_anew(change: str) -> None:
    """A group that is added, and a layer that is exchanged, in the middle of training."""
    found = []
    for cards, shard in ((1, False), (3, True)):
        parallel = mc.Parallel("dp", cards=f"cpu:{cards}", shard_optimizer=shard)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 13), nn.Tanh(), nn.Linear(13, 3)).double()
        late = list(net[4].parameters())
        for parameter in late:
            parameter.requires_grad_(change == "layer")
        optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], 0.05)
        model, optimizer = parallel.setup(net, optimizer)
        step = parallel.train_step(loss_fn, model, optimizer)
        train(step, batches()[:4])
        if change == "group":
            for parameter in late:
                parameter.requires_grad_(True)
            optimizer.add_param_group({"params": late, "lr": 0.01})
        else:
            net[3] = nn.ReLU()
        held = len(optimizer.state_dict()["state"])
        train(step, batches()[4:])
        found.append((held, [p.detach().clone() for p in net.parameters()]))
        parallel.close()
    assert found[1][0] == found[0][0]
    torch.testing.assert_close(found[1][1], found[0][1])


@pytest.mark.parametrize(
    ("drop", "shard"), [("empty", False), ("empty", True), ("replace", False), ("replace", True), ("one", False)]
)
def test_a_script_may_drop_state(drop: str, shard: bool, recwarn: pytest.WarningsRecorder) -> None:
    found = []
    for cards in (1, 2):
        parallel, net, optimizer, step = set_up(OPTIMIZERS["adam"], cards, shard)
        train(step, batches()[:3])
        if drop == "empty":
            optimizer.state.clear()
        elif drop == "replace":
            optimizer.state = defaultdict(dict)
        else:
            del optimizer.state[net.last.weight]
        train(step, batches()[3:6])
        found.append([p.detach().clone() for p in net.parameters()])
        parallel.close()
    torch.testing.assert_close(found[1], found[0])
    assert not [each for each in recwarn if "parameters changed" in str(each.message)]


def test_an_optimizer_that_looks_at_all_parameters_is_refused() -> None:
    parallel, net, _, step = set_up(lambda parameters: Joined(parameters, 0.1), 2, True)
    before = [parameter.clone() for parameter in net.parameters()]
    with pytest.raises(OptimizerError, match="Joined looks at several parameters at once"):
        train(step, batches()[:1])
    for own, old in zip(net.parameters(), before, strict=True):
        assert torch.equal(own, old)
    parallel.close()


def test_large_parts_are_sent_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    from manycard.engine.replicas import sharded

    monkeypatch.setattr(sharded, "_CHUNK", 10)
    nets = []
    for shard in (False, True):
        parallel, net, _, step = set_up(OPTIMIZERS["adamw"], 3, shard)
        train(step, batches()[:3])
        parallel.strategy.check_lockstep(next(iter(parallel.strategy._models)))  # type: ignore[attr-defined]
        nets.append(net)
        parallel.close()
    same_parameters(*nets)


def test_a_parameter_without_numbers_is_sent_like_any_other() -> None:
    from manycard.engine.replicas.sharded import _chunks

    assert _chunks([4, 7], [0, 3]) == [[4, 7]]


@pytest.mark.parametrize("strategy", ["ddp", "torch_dp"])
def test_strategies_that_do_not_share_out_refuse(strategy: str) -> None:
    with pytest.raises(SettingError, match="shard_optimizer"):
        mc.Parallel(strategy, cards="cpu:2", shard_optimizer=True)


def test_one_card_has_it_all() -> None:
    parallel, _, optimizer, step = set_up(OPTIMIZERS["sgd"], 1, True)
    train(step, batches()[:2])
    assert len(optimizer.state) == 6
    parallel.close()
