"""Loaders in two real ranks: streams are shared out, and ranks that load the same, or apart, are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manycard.cards import choose_cards
from manycard.launch import launch_script

SCRIPT = """
import faulthandler, random, sys, warnings
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
import manycard as mc

faulthandler.dump_traceback_later(60, exit=True)


class Stream(IterableDataset):
    def __init__(self, by_rank=False):
        self.by_rank = by_rank

    def __iter__(self):
        rank = torch.distributed.get_rank() if self.by_rank else 0
        for number in range(rank, 23, 2 if self.by_rank else 1):
            drawn = random.random(), np.random.rand(), float(torch.rand(()))
            yield torch.tensor([float(number), *drawn], dtype=torch.float64)


def epoch(loader):
    rows = []
    for batch in loader:
        rows.append(parallel.gather(batch).tolist())
    return rows


parallel = mc.Parallel("ddp", cards="cpu:2", seed=5)
found = {"workers": [epoch(parallel.loader(Stream(), 4, workers=count)) for count in (0, 2)]}
half = parallel.loader(Stream(), 4, workers=2)
for number, batch in enumerate(half):
    if number == 2:
        break
found["state"] = half.state_dict()
try:
    epoch(parallel.loader(Stream(by_rank=True), 4))
except mc.errors.SettingError as error:
    found["by_rank"] = str(error)

tokens = np.arange(200, dtype="uint16")
path = f"{sys.argv[1]}/{parallel.rank}.bin"
tokens.tofile(path)
text = parallel.loader(mc.data.tokens(path, block=8), 6, shuffle=True)
found["tokens"] = [parallel.gather(inputs[:, 0]).tolist() for inputs, _ in text]

module = torch.nn.Linear(1, 1)
model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
loss_fn = lambda model, batch: model(batch).square().mean()
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    data = torch.arange(12.0).view(12, 1)
    parallel.train_step(loss_fn, model, optimizer)(next(iter(parallel.loader(data, batch_size=4))))
    found["own_parts"] = [str(each.message) for each in said if "same batch" in str(each.message)]
    parallel.strategy._compared = False
    parallel.train_step(loss_fn, model, optimizer)(next(iter(DataLoader(data, batch_size=4))))
    found["same"] = [str(each.message) for each in said if "same batch" in str(each.message)]
torch.save(found, f"{sys.argv[1]}/rank{parallel.rank}.pt")
parallel.close()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks saw."""
    folder = tmp_path_factory.mktemp("ranks")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    launch_script([str(script), str(folder)], choose_cards("cpu:2").cards, env={"OMP_NUM_THREADS": "1"})
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def test_a_stream_gives_each_sample_once_over_ranks_and_workers(found: list[dict[str, Any]]) -> None:
    """Under DDP with PyTorch's loader, each of 2 ranks x 2 workers gives all 23."""
    for of_rank in found:
        alone, spread = of_rank["workers"]
        assert [row[0] for batch in alone for row in batch] == list(range(23))
        assert spread == alone, "draws included"
        for column in (1, 2, 3):
            assert len({row[column] for batch in alone for row in batch}) == 23


def test_a_streams_place_is_the_same_on_every_rank(found: list[dict[str, Any]]) -> None:
    assert found[0]["state"] == found[1]["state"]
    assert found[0]["state"]["batches"] == 3


def test_a_stream_that_splits_itself_by_rank_is_refused_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert "Stream'" in of_rank["by_rank"]
        assert "other samples on ranks 1 than on rank 0" in of_rank["by_rank"]


def test_blocks_of_tokens_are_shared_out(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        batches = of_rank["tokens"]
        assert [len(batch) for batch in batches] == [6, 6, 6, 6]
        assert sorted(first for batch in batches for first in batch) == list(range(0, 192, 8))


def test_ranks_that_are_given_the_same_batch_are_told(found: list[dict[str, Any]]) -> None:
    """A DataLoader that knows nothing of ranks: every card trains on the same samples."""
    assert [of_rank["own_parts"] for of_rank in found] == [[], []]
    assert [len(of_rank["same"]) for of_rank in found] == [1, 0], "rank 0 says it"
    assert found[0]["same"][0].startswith("ranks 0, 1 were given the same batch")
