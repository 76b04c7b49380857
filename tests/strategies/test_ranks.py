"""Ranks in one script: what holds beyond a single training, which `ranks_worker` runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from manycard.cards import choose_cards
from manycard.errors import RankFailed
from manycard.launch import launch_script

ONE_AFTER_THE_OTHER = """
import faulthandler, sys
import torch
import manycard as mc

faulthandler.dump_traceback_later(30, exit=True)
losses = []
for accumulate in (1, 2):
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 1)
    parallel = mc.Parallel("ddp", cards="cpu:2", accumulate=accumulate)
    model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    step = parallel.train_step(lambda model, batch: model(batch).square().mean(), model, optimizer)
    for batch in parallel.loader(torch.arange(18.0).view(6, 3) / 9, batch_size=4):
        losses.append(float(step(batch)))
    rank = parallel.rank
    parallel.close()
open(f"{sys.argv[1]}/losses{rank}", "w").write(repr(losses))
"""

UNFROZEN_LATER = """
import faulthandler, sys
import torch
import manycard as mc

faulthandler.dump_traceback_later(30, exit=True)
parallel = mc.Parallel("ddp", cards="cpu:2")
torch.manual_seed(parallel.rank)
layers = torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
module = torch.nn.Sequential(*layers).double().requires_grad_(False)
model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
start = {name: value.clone() for name, value in module.state_dict().items()}
step = parallel.train_step(lambda model, batch: model(batch).square().mean(), model, optimizer)
data = torch.arange(18.0).double().view(6, 3) / 9
for thawed, batch in zip((2, 0, 0), parallel.loader(data, batch_size=2)):
    module[thawed].requires_grad_(True)
    step(batch)
    parallel.check_lockstep(model)
torch.save((start, module.state_dict()), f"{sys.argv[1]}/states{parallel.rank}")
"""

UNEQUAL_CHECK = """
import faulthandler
import torch
import manycard as mc

faulthandler.dump_traceback_later(30, exit=True)
parallel = mc.Parallel("ddp", cards="cpu:2")
module = torch.nn.Linear(1, 1)
model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
# A masked mean: on rank 0 every sample counts and the check finds nothing; on rank 1 few do.
mask = torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 0])
data = list(zip(torch.arange(8.0)[:, None], mask))

def loss_fn(model, batch):
    x, mask = batch
    return (model(x)[:, 0].square() * mask).sum() / mask.sum().clamp(min=1)

for batch in parallel.loader(data, batch_size=8):
    parallel.train_step(loss_fn, model, optimizer)(batch)
"""


def _run(tmp_path: Path, script: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(script)
    launch_script([str(path), str(tmp_path)], choose_cards("cpu:2").cards, env={"OMP_NUM_THREADS": "1"})


def test_one_parallel_after_another(tmp_path: Path) -> None:
    _run(tmp_path, ONE_AFTER_THE_OTHER)
    first, second = ((tmp_path / f"losses{rank}").read_text() for rank in (0, 1))
    assert first == second


def test_a_loss_that_only_one_rank_can_tell_is_wrong_stops_all_of_them(tmp_path: Path) -> None:
    """Report kind rank-local-decision: the check's outcome is one for all ranks, and nobody waits."""
    with pytest.raises(RankFailed) as caught:
        _run(tmp_path, UNEQUAL_CHECK)
    assert "LossError" in caught.value.trace


def test_parameters_frozen_at_set_up_and_thawed_later_train_as_on_one_card(tmp_path: Path) -> None:
    """Report kind frozen-params."""
    _run(tmp_path, UNFROZEN_LATER)
    states = [torch.load(tmp_path / f"states{rank}") for rank in range(2)]
    alone = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double().requires_grad_(False)
    alone.load_state_dict(states[0][0])
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    data = torch.arange(18.0).double().view(6, 3) / 9
    for thawed, batch in zip((2, 0, 0), data.split(2), strict=True):
        alone[thawed].requires_grad_(True)
        optimizer.zero_grad()
        alone(batch).square().mean().backward()
        optimizer.step()
    for start, trained in states:
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(start[name], states[0][0][name], rtol=0, atol=0)
            torch.testing.assert_close(trained[name], value, rtol=1e-9, atol=1e-9)
