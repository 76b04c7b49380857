"""The traps of one process, as `train_step` of the `dp` strategy meets them: optimizers, accumulation, loops.

Rows of the table that `step` and the drop-in share are tested on both: here and in
tests/unit/engine/test_data_parallel_*.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from manycard.errors import OptimizerError

from .both import Both, Make, close, mse, rows
from .models import Net

# ---- mirrored optimizers ------------------------------------------------------------------------------------


def test_edits_of_param_groups_reach_every_card(make: Make) -> None:
    both = Both(make, Net)
    for step in range(6):
        for optimizer in (both.mine, both.theirs):
            group = optimizer.param_groups[0]
            group["lr"] *= 0.5
            group["momentum"] = 0.1 * step
            if step == 3:
                group["weight_decay"] = 0.1
        both.train(rows(7, step))
    both.check()


def test_a_scheduler_of_the_scripts_own_reaches_every_card(make: Make) -> None:
    both = Both(make, Net)
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=8) for o in (both.mine, both.theirs)]
    for step in range(6):
        both.train(rows(7, step))
        for scheduler in schedulers:
            scheduler.step()
    both.check()


def test_optimizer_state_loads_into_every_card(make: Make) -> None:
    both = Both(make, Net)
    for step in range(2):
        both.train(rows(7, step))
    state = both.theirs.state_dict()
    for (index, mine), (_, theirs) in zip(both.mine.state_dict()["state"].items(), state["state"].items(), strict=True):
        close(theirs["momentum_buffer"], mine["momentum_buffer"], f"state {index}")
    doubled = {**state, "state": {i: {"momentum_buffer": s["momentum_buffer"] * 2} for i, s in state["state"].items()}}
    both.mine.load_state_dict(copy.deepcopy(doubled))  # loading keeps the tensors it is given
    both.theirs.load_state_dict(doubled)
    for step in range(3):
        both.train(rows(7, step))
    both.check()


def test_a_group_that_is_added_later_trains(make: Make) -> None:
    """Unfreezing: the body joins after a few steps."""
    parallel = make()
    torch.manual_seed(0)
    alone = Net().double()
    torch.manual_seed(0)
    module = Net().double()
    mine = torch.optim.SGD(alone.head.parameters(), lr=0.1)
    model, theirs = parallel.setup(module, torch.optim.SGD(module.head.parameters(), lr=0.1))
    step = parallel.train_step(mse, model, theirs)
    for number in range(4):
        if number == 2:
            mine.add_param_group({"params": list(alone.body.parameters()), "lr": 0.05})
            theirs.add_param_group({"params": list(module.body.parameters()), "lr": 0.05})
        alone.zero_grad()
        loss = mse(alone, rows(7, number))
        loss.backward()
        mine.step()
        close(step(rows(7, number)), loss.detach(), "loss")
    parallel.check_lockstep(model)
    for name, tensor in alone.state_dict().items():
        close(module.state_dict()[name], tensor, name)


def test_an_optimizer_of_another_model_is_refused(make: Make) -> None:
    parallel = make()
    stranger = torch.optim.SGD(Net().parameters(), lr=0.1)
    with pytest.raises(OptimizerError, match="Fix:"):
        parallel.setup(Net(), stranger)


# ---- accumulation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["single", "dp"])
def test_an_incomplete_group_is_flushed_with_its_true_weight(make: Make, strategy: str) -> None:
    """Report kinds accum-scale, accum-no-sync-wrong. The batches are the script's own, so nothing says the end."""
    parallel = make(strategy, cards="cpu:3" if strategy == "dp" else "cpu:1", accumulate=4)
    torch.manual_seed(0)
    alone = Net().double()
    torch.manual_seed(0)
    module = Net().double()
    mine = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    model, theirs = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    step = parallel.train_step(mse, model, theirs)
    for sizes, updates in (((7, 7, 7, 2), False), ((5, 3), True), ((4, 4, 1, 9), False), ((2,), True)):
        batches = [rows(size, seed) for seed, size in enumerate(sizes)]
        mine.zero_grad()
        for batch in batches:
            (mse(alone, batch) * len(batch[0]) / sum(sizes)).backward()
        mine.step()
        done = []
        for batch in batches:
            step(batch)
            done.append(bool(step.updated))
        assert done == [not updates and index == 3 for index in range(len(sizes))]
        step.flush()
        step.flush()  # a group that is empty is no update
        for name, tensor in alone.state_dict().items():
            close(module.state_dict()[name], tensor, name)


def test_several_forwards_and_backwards_in_the_explicit_loop(make: Make) -> None:
    both = Both(make, Net)
    for number in range(3):
        for model, optimizer, backward in (
            (both.alone, both.mine, Tensor.backward),
            (both.model, both.theirs, both.parallel.backward),
        ):
            first, second = model(rows(7, number)[0]), model(rows(4, number + 9)[0])
            backward(first.square().mean() + second.mean())
            backward(F.mse_loss(model(rows(2)[0]), rows(2)[1]))
            optimizer.step()
            optimizer.zero_grad()
    both.check()


def test_step_and_explicit_loop_take_turns(make: Make) -> None:
    both = Both(make, Net)
    for number in range(4):
        both.train(rows(7, number))
        both.mine.zero_grad()
        both.theirs.zero_grad()
        mse(both.alone, rows(5, number)).backward()
        both.parallel.backward(mse(both.model, rows(5, number)))
        both.mine.step()
        both.theirs.step()
    both.check()
