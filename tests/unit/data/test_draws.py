"""Augmentation draws: different for every sample, rank, worker and epoch; the same from one seed."""

from __future__ import annotations

import gc
import os
import random
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Subset

from manycard.data import Feed, GlobalLoader
from manycard.errors import SettingError

from .datasets import (
    Augmented,
    AugmentedAtOnce,
    WorkerSeen,
    joined,
    ranks,
    same_seed_everywhere,
    tell_dataset,
    walk,
)


def _states() -> tuple[Any, ...]:
    return random.getstate(), str(np.random.get_state(legacy=False)), torch.get_rng_state().tolist()


def _epochs(epochs: int, world_size: int, **settings: Any) -> list[list[Any]]:
    """The rows of each epoch, from all ranks, by sample."""
    loaders = ranks(Augmented(12), 4, world_size, shuffle=True, **settings)
    rows = []
    for _ in range(epochs):
        whole = joined([walk(loader) for loader in loaders])
        rows.append(sorted(row for batch in whole for row in batch))
    return rows


def test_kind_seed_same_draws_differ_in_every_sample_worker_and_epoch() -> None:
    loaders = ranks(Augmented(12), 4, 2, num_workers=2, worker_init_fn=same_seed_everywhere)
    rows = [row for _ in range(2) for batch in joined([walk(loader) for loader in loaders]) for row in batch]
    for column, source in enumerate(("random", "numpy.random", "torch"), 1):
        drawn = [row[column] for row in rows]
        assert len(set(drawn)) == 24, f"{source} gave a draw twice"


def test_draws_are_the_same_for_every_number_of_cards_and_workers() -> None:
    expected = _epochs(2, 1)
    assert _epochs(2, 3) == expected
    assert _epochs(2, 1, num_workers=2, persistent_workers=True) == expected
    assert _epochs(2, 2, num_workers=1) == expected
    assert _epochs(1, 1, seed=1) != expected[:1]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_both_ways_to_start_workers(context: str) -> None:
    assert _epochs(1, 1, num_workers=1 + (context == "fork"), multiprocessing_context=context) == _epochs(1, 1)


def test_loading_leaves_the_process_random_state_alone() -> None:
    before = _states()
    _epochs(1, 1)
    _epochs(1, 1, num_workers=1)
    assert _states() == before


def test_the_script_draws_between_batches_as_it_would_without_loading() -> None:
    torch.manual_seed(3)
    expected = [float(torch.rand(())) for _ in range(3)]
    torch.manual_seed(3)
    assert [float(torch.rand(())) for _ in GlobalLoader(Augmented(12), 4, feed=Feed())] == expected


def test_subsets_are_seeded_by_sample() -> None:
    whole = joined([walk(loader) for loader in ranks(Subset(Augmented(12), range(12)), 4, 1)])
    assert whole == joined([walk(loader) for loader in ranks(Augmented(12), 4, 2)])


class Seeds:
    """Samples are the seeds that they are given."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, -1])

    def with_seeds(self, indices: list[int], seeds: list[int]) -> list[Any]:
        return [torch.tensor([index, seed % 2**62]) for index, seed in zip(indices, seeds, strict=True)]


class Changed(Seeds):
    """Changes what a sample is."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, -2])


class Wrapper:
    """Hands on all that it doesn't have itself."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, -3])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_a_dataset_may_take_seeds() -> None:
    def seeds(world_size: int) -> dict[int, int]:
        batches = joined([walk(loader) for loader in ranks(Seeds(), 4, world_size, shuffle=True, seed=3)])
        return dict(row for batch in batches for row in batch)

    alone = seeds(1)
    assert len(set(alone.values())) == 12
    assert seeds(3) == alone

    for dataset, mark in ((Changed(), -2), (Wrapper(Seeds()), -3)):
        ((rows, _),) = walk(ranks(dataset, 12, 1)[0])
        assert [seed for _, seed in rows] == [mark] * 12


def test_datasets_that_fetch_batches_repeat_from_one_seed() -> None:
    def rows(epochs: int) -> list[Any]:
        loader = GlobalLoader(AugmentedAtOnce(12), 4, num_workers=1, feed=Feed())
        return [walk(loader) for _ in range(epochs)]

    assert rows(2) == rows(2)
    drawn = [row[1] for epoch in rows(2) for batch, _ in epoch for row in batch]
    assert len(set(drawn)) == 24


def test_worker_init_fn_finds_the_users_dataset() -> None:
    loader = GlobalLoader(WorkerSeen(8), 2, num_workers=2, worker_init_fn=tell_dataset, feed=Feed())
    told = [row[1] for batch, _ in walk(loader) for row in batch]
    assert sorted(set(told)) == [100.0, 101.0]


def test_seeds_that_worker_init_fn_sees_differ_by_rank_and_epoch() -> None:
    loaders = ranks(WorkerSeen(4), 4, 2, num_workers=1, worker_init_fn=_tell_initial_seed)
    seeds = {batch[0][1] for _ in range(2) for loader in loaders for batch, _ in walk(loader)}
    assert len(seeds) == 4


def _tell_initial_seed(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.told = float(torch.initial_seed() % 2**40)  # type: ignore[attr-defined]


def test_persistent_workers_live_on_and_end_with_the_loader() -> None:
    loader = GlobalLoader(WorkerSeen(8), 2, num_workers=2, persistent_workers=True, feed=Feed())
    first, second = ({int(row[2]) for batch, _ in walk(loader) for row in batch} for _ in range(2))
    assert first == second
    assert os.getpid() not in first
    del loader
    _, alive = psutil.wait_procs([each for each in psutil.Process().children() if each.pid in first], 10)
    assert not alive


def test_breaking_off_ends_the_workers() -> None:
    loader = GlobalLoader(WorkerSeen(40), 2, num_workers=2, feed=Feed())
    before = set(psutil.Process().children(recursive=True))
    walk(loader, 2)
    left = set(psutil.Process().children(recursive=True)) - before
    _, alive = psutil.wait_procs(left, 10)
    assert not alive


def test_epochs_leave_no_file_and_no_process_open() -> None:
    loader = GlobalLoader(Augmented(12), 4, num_workers=2, feed=Feed())
    walk(loader)
    process = psutil.Process()
    gc.collect()  # iterators of before may still hold their workers' pipes
    files, children = process.num_fds(), set(process.children())
    for _ in range(3):
        walk(loader)
    gc.collect()
    assert process.num_fds() <= files
    assert set(process.children()) <= children


def test_a_collate_function_may_draw_too() -> None:
    def mixed(samples: list[int]) -> torch.Tensor:
        return torch.tensor(samples) + torch.rand(())

    before = _states()
    first, second = ([walk(GlobalLoader(list(range(6)), 2, collate_fn=mixed, feed=Feed()))] for _ in range(2))
    assert first == second
    assert _states() == before


def test_persistent_workers_walk_one_iteration_at_a_time() -> None:
    loader = GlobalLoader(Augmented(12), 2, num_workers=1, persistent_workers=True, feed=Feed())
    older = iter(loader)
    next(older)
    newer = iter(loader)
    next(newer)
    with pytest.raises(SettingError, match="taken the workers over"):
        next(older)
