"""The traps of one process, as `train_step` of the `dp` strategy meets them: failures, threads, ends.

Rows of the table that `step` and the drop-in share are tested on both: here and in
tests/unit/engine/test_data_parallel_*.py.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import traceback
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manycard as mc
from manycard.errors import LockstepError, ManycardError, NeedsRanks
from tests.conftest import threads_left

from .both import Both, Make, mse, rows
from .models import Dropped, Net

# ---- an engine that is dropped ------------------------------------------------------------------------------


def test_a_closed_and_dropped_parallel_leaves_no_threads_and_no_copies() -> None:
    before = set(threading.enumerate())
    seen: list[Any] = []

    def loss(model: Any, batch: Any) -> Tensor:
        seen.append(weakref.ref(model))
        return mse(model, batch)

    parallel = mc.Parallel("dp", cards="cpu:3")
    module = Net().double()
    model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    step = parallel.train_step(loss, model, optimizer)
    step(rows(6))
    copies = [ref for ref in seen if ref() is not None and ref() not in (module, model)]
    assert copies
    parallel.close()
    del parallel, model, optimizer, step
    gc.collect()
    assert not threads_left(before)
    gc.collect()
    assert all(ref() is None or ref() is module for ref in copies)


def test_a_dropped_parallel_that_was_never_closed_ends_its_threads() -> None:
    before = set(threading.enumerate())
    parallel = mc.Parallel("dp", cards="cpu:3")
    module = Net().double()
    model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    parallel.train_step(mse, model, optimizer)(rows(6))
    del parallel, model, optimizer, module
    gc.collect()
    assert not threads_left(before)


# ---- failures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("card", [0, 1, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_exception_on_one_card_arrives_by_name_and_the_next_step_works(
    make: Make, card: int, accumulate: int
) -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        if bool((batch[0] > 100).any()):
            raise ValueError("no such word")
        return mse(model, batch)

    both = Both(make, Net, loss)
    bad, y = rows(6)
    bad[2 * card] = 1000
    both.train(rows(6))
    for _ in range(2):
        with pytest.raises(ValueError, match="no such word") as caught:
            both.step((bad, y))
        text = "".join(traceback.format_exception(caught.value))
        assert f"cpu:{card}" in text
        assert 'raise ValueError("no such word")' in text
    both.train(rows(6))
    both.check()


def test_an_exception_drops_the_unfinished_group(make: Make) -> None:
    both = Both(lambda: make(accumulate=2), Net)
    x, y = rows(6)
    both.step((x, y))
    with pytest.raises(RuntimeError):
        both.step((x[:, :4], y))
    both.mine.zero_grad()
    for batch in (rows(6, 5), rows(3, 6)):
        (mse(both.alone, batch) * len(batch[0]) / 9).backward()
        both.step(batch)
    both.mine.step()
    both.check()


def test_an_exception_while_others_wait_for_the_card_ends_the_waiting(make: Make) -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        if bool((batch[0] > 100).any()):
            raise ValueError("no such word")
        return mse(model, batch)

    parallel = make(sync_batchnorm=True)
    module = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()
    model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    step = parallel.train_step(loss, model, optimizer)
    step(rows(6))
    for card in range(3):
        bad, y = rows(6)
        bad[2 * card] = 1000
        begun = time.monotonic()
        with pytest.raises(ValueError, match="no such word"):
            step((bad, y))
        assert time.monotonic() - begun < 2
    step(rows(6))
    parallel.check_lockstep(model)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers")
@pytest.mark.parametrize("card", [0, 1])
def test_ctrl_c_in_the_middle_of_a_step_arrives_at_once_and_leaves_lockstep(make: Make, card: int) -> None:
    slow = threading.Event()

    def loss(model: Any, batch: Any) -> Tensor:
        if slow.is_set() and bool((batch[0] > 100).any()):
            for _ in range(30):
                time.sleep(0.05)
        return mse(model, batch)

    both = Both(make, Net, loss)
    both.train(rows(6))
    x, y = rows(6)
    x[2 * card] = 1000
    slow.set()
    interrupt = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    begun = time.monotonic()
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        both.step((x, y))
    waited = time.monotonic() - begun
    interrupt.join()
    slow.clear()
    assert waited < 1, "the script must not wait for the card's work"
    both.parallel.check_lockstep(both.model)
    both.train(rows(6, 2))
    both.check()


def test_a_replica_that_differs_is_found(make: Make) -> None:
    replicas: dict[int, Any] = {}

    def loss(model: Any, batch: Any) -> Tensor:
        replicas[id(model)] = model
        return mse(model, batch)

    both = Both(make, Net, loss)
    both.train(rows(6))
    both.parallel.check_lockstep(both.model)
    others = [replica for replica in replicas.values() if replica.head.bias is not both.module.head.bias]
    assert others
    with torch.no_grad():
        others[-1].head.bias[0] += 1e-12
    with pytest.raises(LockstepError, match=r"head\.bias"):
        both.parallel.check_lockstep(both.model)


# ---- the rest -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system can't fork")
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_loader_workers_start_while_card_threads_run(make: Make, method: str) -> None:
    from torch.utils.data import DataLoader

    both = Both(make, Net)
    both.train(rows(6))
    data = [tuple(part[0] for part in rows(1, seed)) for seed in range(12)]
    loader = DataLoader(data, batch_size=6, num_workers=1, multiprocessing_context=method)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of fork in a process with threads
        for batch in loader:
            both.train(batch)
    both.check()


def test_two_threads_of_the_script_are_served_in_turn_or_refused(make: Make) -> None:
    both = Both(make, Net)
    results: list[Any] = []

    def work(seed: int) -> None:
        try:
            results.append(float(both.step(rows(6, seed))))
        except ManycardError as refused:
            results.append(refused)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert len(results) == 4
    both.parallel.check_lockstep(both.model)
    assert all(bool(parameter.isfinite().all()) for parameter in both.module.parameters())


def test_dropout_draws_repeat_and_differ_between_cards(make: Make) -> None:
    losses = []
    masks: list[Tensor] = []

    def loss(model: Any, batch: Any) -> Tensor:
        masks.append(F.dropout(torch.ones(64), 0.5))
        return mse(model, batch)

    for _ in range(2):
        parallel = make(seed=4)
        torch.manual_seed(9)
        module = Dropped().double()
        model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        step = parallel.train_step(loss, model, optimizer, check_loss=False)
        losses.append([float(step(rows(7, number))) for number in range(4)])
    assert losses[0] == losses[1]
    assert len({tuple(mask.tolist()) for mask in masks[:12]}) == 12


def test_losses_are_fresh_tensors_without_a_graph(make: Make) -> None:
    """Report kind leak-loss: a list of losses keeps no graph, and none is overwritten."""
    both = Both(make, Net)
    losses = [both.step(rows(7, number)) for number in range(3)]
    assert not any(loss.requires_grad for loss in losses)
    assert all(loss.shape == () for loss in losses)
    assert len({float(loss) for loss in losses}) == 3


def test_one_process_can_not_be_several_ranks() -> None:
    with pytest.raises(NeedsRanks, match="manycard run"):
        mc.Parallel("ddp", cards="cpu:2")


@pytest.mark.parametrize("accumulate", [0, -1, 1.5])
def test_accumulate_is_a_count(make: Make, accumulate: Any) -> None:
    with pytest.raises(ManycardError, match="accumulate"):
        make(accumulate=accumulate)
