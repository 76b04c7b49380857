"""Two ranks that plant causes of ranks drifting apart, and write down what `check_lockstep` says of each."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import manycard as mc
from manycard.errors import LockstepError


class Two(nn.Module):
    """Two equal layers, and a method that is not forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())

    def sample(self, x: Tensor) -> Tensor:
        return self(x) + 1


def model_and_batch(**options: bool) -> tuple[DistributedDataParallel, Tensor]:
    torch.manual_seed(0)
    net = Two()
    torch.manual_seed(dist.get_rank() + 1)
    return DistributedDataParallel(net, **options), torch.randn(8, 4)


def train(loss: Tensor, *models: nn.Module) -> None:
    loss.backward()
    for model in models:
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def healthy() -> object:
    model, x = model_and_batch()
    train(model(x).square().mean(), model)
    return mc.check_lockstep(model)


def method_on_the_inner_module() -> object:
    model, x = model_and_batch()
    train(model.module.sample(x).square().mean(), model)
    return mc.check_lockstep(model)


def second_loss_round_the_wrapper() -> object:
    model, x = model_and_batch()
    model(x).square().mean().backward()
    train(model.module.sample(x).square().mean(), model)
    return mc.check_lockstep(model)


def layer_added_after_wrapping() -> object:
    model, x = model_and_batch()
    torch.manual_seed(0)
    model.module.head = nn.Linear(4, 1)
    train(model.module.head(model(x)).square().mean(), model)
    return mc.check_lockstep(model)


def unfrozen_after_wrapping() -> object:
    torch.manual_seed(0)
    net = Two()
    net.a.requires_grad_(False)
    model = DistributedDataParallel(net)
    net.a.requires_grad_(True)
    train(model(torch.randn(8, 4) + dist.get_rank()).square().mean(), model)
    return mc.check_lockstep(model)


def no_sync_in_the_last_micro_batch() -> object:
    model, x = model_and_batch()
    for micro_batch in range(4):
        with model.no_sync() if micro_batch % 4 != 0 else contextlib.nullcontext():  # should be != 3
            model(x).square().mean().backward()
    return mc.check_lockstep(model)


def another_order() -> object:
    torch.manual_seed(0)
    layers = [("a", nn.Linear(4, 4)), ("b", nn.Linear(4, 4))]
    net = nn.ModuleDict(layers if dist.get_rank() == 0 else layers[::-1])
    return mc.check_lockstep(DistributedDataParallel(net))


def another_model() -> object:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), *([nn.Linear(4, 4)] if dist.get_rank() else []))
    return mc.check_lockstep(net)


def unused_parameter_in_the_bucket() -> object:
    model, x = model_and_batch()
    x.requires_grad_(True)
    slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
    train(slope.square().sum(), model)  # a gradient penalty: b.bias has no part in it
    return mc.check_lockstep(model)


def no_wrapper() -> object:
    torch.manual_seed(0)
    net = Two()
    train(net(torch.randn(8, 4) + dist.get_rank()).square().mean(), net)
    return mc.check_lockstep(net)


def started_apart() -> object:
    torch.manual_seed(dist.get_rank())
    return mc.check_lockstep(Two())


def changed_in_rank_0_only() -> object:
    model, x = model_and_batch()
    train(model(x).square().mean(), model)
    if dist.get_rank() == 0:
        model.module.a.bias.data.clamp_(min=0.0)
    return mc.check_lockstep(model)


def nan_in_rank_1_only() -> object:
    model, _ = model_and_batch()
    if dist.get_rank() == 1:
        model.module.b.weight.data[1, 2] = float("nan")
    return mc.check_lockstep(model)


def trained_outside_the_wrapper() -> object:
    model, x = model_and_batch()
    weights = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([*model.parameters(), weights], lr=0.1)
    (model(x).square() * weights).mean().backward()
    optimizer.step()
    return mc.check_lockstep(model, optimizer=optimizer)


def batchnorm() -> object:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model(torch.randn(8, 4) + dist.get_rank()).sum().backward()
    return mc.check_lockstep(model)


def codebook() -> object:
    model, x = model_and_batch()
    model.module.register_buffer("codes", x.mean(0))
    return mc.check_lockstep(model)


def a_loop_that_goes_wrong_at_step_7() -> object:
    parallel = mc.Parallel("ddp", cards=f"cpu:{dist.get_world_size()}", seed=0, check_every=5)
    net = Two()
    model, optimizer = parallel.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for number in range(1, 20):
        x = torch.randn(8, 4) + parallel.rank
        out = net.sample(x) if number >= 7 else model(x)
        parallel.backward(out.square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return "nothing was said"


def a_train_step() -> object:
    parallel = mc.Parallel("ddp", cards=f"cpu:{dist.get_world_size()}", seed=0, check_every=2)
    net = Two()
    model, optimizer = parallel.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    step = parallel.train_step(lambda model, x: model(x).square().mean(), model, optimizer, clip_norm=1.0)
    for _ in range(6):
        step(torch.randn(8, 4) + parallel.rank)
    return parallel.check_lockstep(model)


CASES: list[Callable[[], object]] = [
    value for value in list(globals().values()) if callable(value) and getattr(value, "__module__", "") == __name__
][3:]


def said(case: Callable[[], object]) -> dict[str, object]:
    try:
        report = case()
    except LockstepError as error:
        return {"error": str(error), "findings": [str(finding) for finding in error.findings]}
    return {"error": "", "findings": [str(f) for f in getattr(report, "findings", [])], "report": str(report)}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    results = {}
    for case in CASES:
        results[case.__name__] = said(case)
        dist.barrier()
    Path(sys.argv[1], f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
