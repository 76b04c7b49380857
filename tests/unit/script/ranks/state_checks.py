"""What is checked in ranks: draws, statistics, what the script changes, and what is refused."""

from __future__ import annotations

import copy
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from manycard.engine.batches.sizes import shard_sizes
from manycard.errors import LockstepError, ModelError

from .checks import CHECKS, Rank, Sometimes, both, check, close, mlp

__all__ = ["CHECKS"]


@check
def follows_what_the_script_changes(here: Rank) -> None:
    x = torch.randn(6, 5)

    def train(module: nn.Module) -> Any:
        found = [module(x).detach()]
        module[0].weight.requires_grad_(False)
        module(x).sum().backward()
        assert module[0].weight.grad is None
        module[2] = copy.deepcopy(module[2])
        with torch.no_grad():
            module[2].weight.add_(1.0)
        found.append(module(x).detach())
        return found

    both(here, mlp(), train)
    assert here.spread() == 3, here.reasons()


@check
def runs_whole_where_samples_are_few_or_threads_call(here: Rank) -> None:
    module, few = mlp(), torch.randn(here.world - 1, 5)
    with here.plainly():
        expected = module(few)
    assert torch.equal(module(few), expected)
    assert here.spread() == 0
    values: list[Tensor] = []
    thread = threading.Thread(target=lambda: values.append(module(torch.ones(6, 5))))
    thread.start()
    thread.join()
    assert len(values) == 1
    assert here.spread() == 0
    assert any("thread" in reason for reason in here.reasons())


@check
def says_why_a_call_stays_whole(here: Rank) -> None:
    class Coupled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).softmax(0)

    both(here, Coupled(), lambda module: module(torch.linspace(0, 1, 30).view(6, 5)).square().sum().backward())
    assert here.spread() == 0
    assert here.peers.gather_objects(here.reasons()) == [here.reasons()] * here.world


class _Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(50))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x * self.scale, 0.5) + 0 * (random.random() + float(np.random.rand()))


@check
def draws_apart_inside_and_alike_outside(here: Rank) -> None:
    module, x = _Draws(), torch.ones(here.world * 2, 50)
    random.seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first, second = module(x).detach(), module(x).detach()
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    here.same_everywhere([first, second])
    assert here.spread() == 2, here.reasons()
    assert not torch.equal(first, second)
    assert len({tuple(row) for row in first.tolist()}) == len(first)
    torch.manual_seed(0)
    module(x)
    torch.manual_seed(5)
    other = module(x).detach()
    torch.manual_seed(6)
    module(x)
    torch.manual_seed(5)
    assert torch.equal(module(x).detach(), other)


@check
def keeps_statistics_of_rank_0(here: Rank) -> None:
    module, x = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), torch.randn(here.world * 3 + 1, 5)
    plain = copy.deepcopy(module)
    with here.plainly():
        plain(x[: shard_sizes(len(x), here.world)[0]])
    module(x).sum().backward()
    close(module.state_dict(), plain.state_dict())
    here.same_everywhere(dict(module.state_dict()))
    assert any("BatchNorm" in why for report in here.spreading.reports for why in report.differs)


@check
def takes_statistics_of_all_when_synced(here: Rank) -> None:
    x = torch.randn(here.world * 3 + 1, 5)

    def train(module: nn.Module) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        losses = []
        for batch in (x, x[:-1], x[: here.world - 1]):  # the last runs whole
            loss = module(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    both(here, nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)), train)
    assert here.spread() == 2, here.reasons()


CHECKS["statistics_synced"] = CHECKS.pop("takes_statistics_of_all_when_synced")


@check
def goes_through_autocast_and_checkpoints(here: Rank) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = mlp(), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            inner = checkpoint(self.first, x.requires_grad_(x.is_floating_point()), use_reentrant=True)
            return self.second(inner)

    x = torch.randn(6, 5)

    def train(module: nn.Module) -> Any:
        module(x.clone().requires_grad_()).square().mean().backward()
        with torch.autocast("cpu", torch.bfloat16):
            return module(x.clone().requires_grad_()).dtype == torch.bfloat16

    both(here, Checkpointed(), train)
    assert here.spread() >= 1, here.reasons()


@check
def refuses_create_graph_and_a_second_backward(here: Rank) -> None:
    module, x = mlp(), torch.randn(6, 5).requires_grad_()
    with pytest.raises(ModelError, match=r"create_graph.*--strategy dp"):
        torch.autograd.grad(module(x).sum(), x, create_graph=True)
    loss = module(x).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@check
def notices_other_batches_and_other_parameters(here: Rank) -> None:
    module, x = mlp(), torch.randn(6, 5)
    module(x)
    with pytest.raises(LockstepError, match=r"in call 2 of Sequential the inputs differ"):
        module(x + here.rank)
    module(x)
    with pytest.raises(LockstepError, match=r"call 3 of Sequential is not the same call"):
        module(torch.randn(6 + here.rank, 5))
    drifted = mlp()
    with torch.no_grad():
        drifted[0].weight.add_(here.rank)
    with pytest.raises(LockstepError, match=r"in call 1 of Sequential the parameters differ"):
        drifted(x)
    labelled = Sometimes()
    with pytest.raises(LockstepError, match=r"in call 1 of Sometimes the inputs differ"):
        labelled(x, torch.arange(6) + here.rank)
