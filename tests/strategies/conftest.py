"""How a run's result is obtained: in this process, or from the ranks that ran everything once."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import manycard as mc
from manycard.errors import RankFailed

from .both import Make
from .runs import RUNS

WORKER = Path(__file__).with_name("ranks_worker.py")

Get = Callable[[str, int, str], list[Any]]
"""``get(strategy, cards, name)`` -> what the run gave back, by rank."""


SECONDS_FOR_RANKS = 420
"""The first test that needs ranks waits until they have run everything."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give tests that may start the ranks the time for it."""
    for item in items:
        if "get" in getattr(item, "fixturenames", ()) and config.pluginmanager.hasplugin("timeout"):
            item.add_marker(pytest.mark.timeout(SECONDS_FOR_RANKS))


@pytest.fixture(scope="session")
def rank_results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """``rank_results(cards)`` -> what each rank of `ddp` got from every run.

    Where several processes of pytest share the tests, the first that needs the ranks of a count runs them for all.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # each process has a folder of its own in there

    @cache
    def results(count: int) -> list[dict[str, Any]]:
        folder = base / f"ranks{count}"
        folder.mkdir(exist_ok=True)
        failure = folder / "failure"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not failure.exists():
                failure.write_text(_run_ranks(count, folder))
        if text := failure.read_text():
            pytest.fail(text)
        return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(count)]

    return results


def _run_ranks(count: int, folder: Path) -> str:
    """Run everything on `count` ranks, which write into `folder`; gives why they failed, or nothing."""
    from manycard.cards import choose_cards
    from manycard.launch import launch_script

    cards = choose_cards(f"cpu:{count}").cards
    try:
        launch_script([str(WORKER), str(folder), "ddp", f"cpu:{count}"], cards, env={"OMP_NUM_THREADS": "1"})
    except RankFailed as failed:
        running = {path.stem: path.read_text() for path in sorted(folder.glob("*.running"))}
        return f"{failed}\nwhile running {running}\n{failed.trace}"
    return ""


@pytest.fixture
def get(rank_results: Callable[[int], list[dict[str, Any]]], tmp_path: Path) -> Get:
    """What a run gave back under a strategy, by rank."""

    def result(strategy: str, cards: int, name: str) -> list[Any]:
        if strategy != "ddp":
            return [RUNS[name](partial(mc.Parallel, strategy, cards=f"cpu:{cards}"), tmp_path)]
        by_rank = [results[name] for results in rank_results(cards)]
        for rank, value in enumerate(by_rank):
            assert not isinstance(value, str), f"rank {rank} of {cards}:\n{value}"
        return by_rank

    return result


@pytest.fixture
def make() -> Iterator[Make]:
    """Make `Parallel` on 3 simulated cards, closed when the test ends."""
    made: list[mc.Parallel] = []

    def parallel(strategy: str = "dp", cards: str = "cpu:3", **options: Any) -> mc.Parallel:
        made.append(mc.Parallel(strategy, cards=cards, **options))
        return made[-1]

    yield parallel
    for one in made:
        one.close()
