"""What processes tell one another: nothing where there is one, and the same on every rank where there are more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manycard.cards import choose_cards
from manycard.data.feed import BatchInfo, Feed
from manycard.launch import launch_script
from manycard.strategies.peers import Peers

RANK = """
import faulthandler, os, sys
import torch
from torch import nn
from manycard.cards import choose_cards
from manycard.data.feed import BatchInfo, Feed
from manycard.strategies.peers import Ranks

faulthandler.dump_traceback_later(30, exit=True)
rank = int(os.environ["RANK"])
peers = Ranks(choose_cards("cpu:2").cards[rank])
feed = Feed()
# Rank 0 has 3 samples; rank 1 has a stand-in, whose one sample counts nothing.
feed.current = BatchInfo(held=(3, 1)[rank], samples=(3, 0)[rank], last=False)
rows = torch.arange(6.0).view(3, 2) if rank == 0 else torch.full((1, 2), 9.0)

dense, sparse, unused, frozen = [nn.Parameter(torch.zeros(3, 2)) for _ in range(4)]
frozen.requires_grad_(False)
dense.grad = torch.full((3, 2), 4.0) if rank == 0 else None
# Sparse on rank 1 only.
grad = torch.tensor([[2.0, 2], [0, 0], [0, 0]])
sparse.grad = grad if rank == 0 else grad.to_sparse(1)
peers.average_gradients([dense, sparse, unused, frozen])

numbers = torch.full((2,), float(rank))
peers.broadcast([numbers])
torch.save({
    "place": (peers.rank, peers.world_size),
    "total": float(peers.total(rank + 1)),
    "gathered": peers.gather({"rows": rows, "mean": torch.tensor(5.0 + rank)}, feed),
    "objects": peers.gather_objects(f"of {rank}"),
    "numbers": numbers,
    "dense": dense.grad,
    "sparse": sparse.grad.to_dense(),
    "none": unused.grad is None and frozen.grad is None,
}, f"{sys.argv[1]}/rank{rank}")
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks was told."""
    folder = tmp_path_factory.mktemp("peers")
    script = folder / "script.py"
    script.write_text(RANK)
    launch_script([str(script), str(folder)], choose_cards("cpu:2").cards, env={"OMP_NUM_THREADS": "1"})
    return [torch.load(folder / f"rank{rank}") for rank in range(2)]


def test_every_rank_is_told_the_same(ranks: list[dict[str, Any]]) -> None:
    for rank, told in enumerate(ranks):
        assert told["place"] == (rank, 2)
        assert told["total"] == 3
        assert told["objects"] == ["of 0", "of 1"]
        assert torch.equal(told["numbers"], torch.zeros(2))


def test_a_stand_in_is_left_out_of_what_is_gathered(ranks: list[dict[str, Any]]) -> None:
    for told in ranks:
        assert torch.equal(told["gathered"]["rows"], torch.arange(6.0).view(3, 2))
        assert float(told["gathered"]["mean"]) == 5


def test_gradients_are_averaged_over_ranks_that_have_none_or_sparse_ones(ranks: list[dict[str, Any]]) -> None:
    for told in ranks:
        assert torch.equal(told["dense"], torch.full((3, 2), 2.0))
        assert torch.equal(told["sparse"], torch.tensor([[2.0, 2], [0, 0], [0, 0]]))
        assert told["none"]


def test_alone_everything_comes_back_as_it_was_given() -> None:
    peers, feed = Peers(), Feed()
    feed.current = BatchInfo(held=3, samples=2, last=False)
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = gradient = torch.ones(2)
    peers.average_gradients([parameter])
    peers.broadcast([parameter])
    assert (peers.rank, peers.world_size, peers.total(3), peers.gather_objects("own")) == (0, 1, 3, ["own"])
    assert peers.gather(gradient, feed) is gradient
    assert peers.all_reduce(gradient) is gradient
    assert parameter.grad is gradient
    assert torch.equal(gradient, torch.ones(2))
