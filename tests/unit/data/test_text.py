"""Blocks of tokens: every token once, in one stream over many files; bad files are named."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import manycard as mc
from manycard.data import Feed, GlobalLoader, tokens
from manycard.errors import DataError, SettingError

from .datasets import joined

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write numbers to a file."""

    def to_file(name: str, numbers: Any, dtype: str = "uint16", header: bytes = b"") -> Path:
        path = tmp_path / name
        path.write_bytes(header + np.asarray(numbers, dtype=dtype).tobytes())
        return path

    return to_file


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4), block=st.integers(1, 9), pad=st.booleans())
def test_blocks_are_the_stream_whatever_the_files(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], block: int, pad: bool
) -> None:
    folder, whole, paths = tmp_path_factory.mktemp("tokens"), np.arange(100, 100 + sum(sizes)), []
    for number, part in enumerate(np.split(whole, np.cumsum(sizes)[:-1])):
        paths.append(folder / f"{number}.bin")
        part.astype("uint16").tofile(paths[-1])
    full, left = divmod(len(whole) - 1, block)
    if full == 0 and not (pad and left):
        with pytest.raises(DataError, match="tokens, and a block of"):
            tokens(paths, block, pad_last=pad)
        return
    data = tokens(paths, block, pad_last=pad)
    assert len(data) == full + (pad and left > 0)
    assert data.tokens == len(whole)
    inputs = torch.cat([data[i][0] for i in range(full)] or [torch.zeros(0)])
    targets = torch.cat([data[i][1] for i in range(full)] or [torch.zeros(0)])
    assert inputs.tolist() == whole[: full * block].tolist()
    assert targets.tolist() == whole[1 : full * block + 1].tolist()
    if pad and left:
        x, y = data[-1]
        assert x.tolist() == [*whole[full * block :].tolist(), *[0] * (block - left - 1)][:block]
        assert y.tolist() == [*whole[full * block + 1 :].tolist(), *[-100] * (block - left)]


def test_a_padded_blocks_loss_is_that_of_its_tokens(write: Write) -> None:
    x, y = tokens(write("a.bin", range(6)), 8, pad_last=True)[0]
    scores = torch.randn(8, 10)
    assert torch.equal(F.cross_entropy(scores, y), F.cross_entropy(scores[:5], torch.arange(1, 6)))
    assert x.dtype == y.dtype == torch.int64


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (3, 0), (2, 1)])
def test_global_batches_are_the_same_for_every_number_of_ranks_and_workers(
    write: Write, world_size: int, workers: int
) -> None:
    paths = [write("a.bin", range(50)), write("b.bin", range(50, 103))]

    def loaders(count: int, workers: int) -> list[GlobalLoader]:
        return [
            GlobalLoader(
                tokens(paths, 4), 6, shuffle=True, seed=3, rank=rank, world_size=count, num_workers=workers, feed=Feed()
            )
            for rank in range(count)
        ]

    def epoch(each: list[GlobalLoader], batches: int | None = None) -> list[list[Any]]:
        return joined([_walk(loader, batches) for loader in each])

    alone = loaders(1, 0)
    first, second = epoch(alone), epoch(alone)
    assert sorted(row[0] for batch in first for row in batch) == list(range(0, 100, 4))
    assert first != second
    spread = loaders(world_size, workers)
    assert epoch(spread, 2) == first[:2]
    state = spread[0].state_dict()
    resumed = loaders(2, 0)
    for loader in resumed:
        loader.load_state_dict(state)
    assert epoch(resumed) == first[2:]
    assert epoch(resumed) == second


def _walk(loader: GlobalLoader, batches: int | None) -> list[Any]:
    handed = []
    for inputs, targets in loader:
        assert loader.feed.current is not None
        assert torch.equal(inputs + 1, targets)
        handed.append((inputs.tolist(), loader.feed.current))
        if len(handed) == batches:
            break
    return handed


def test_in_a_run_on_two_cards(write: Write) -> None:
    path = write("a.bin", np.arange(900) % 50)
    losses = []
    for cards in ("cpu:1", "cpu:2"):
        parallel = mc.Parallel("dp", cards=cards, seed=0)
        net = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50)).double()
        model, optimizer = parallel.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        step = parallel.train_step(_loss, model, optimizer)
        loader = parallel.loader(mc.data.tokens(path, block=16, vocab=50), batch_size=10, shuffle=True)
        losses.append([float(step(batch)) for batch in loader])
        parallel.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert len(losses[0]) == 6


def _loss(model: Any, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def test_headers_and_other_types(write: Write) -> None:
    plain = write("a.bin", range(70_000, 70_009), "int32", header=b"x" * 20)
    assert tokens(plain, 4, "int32", header=20)[1][1].tolist() == list(range(70_005, 70_009))


def test_bad_files_are_named(write: Write, tmp_path: Path) -> None:
    odd, empty = tmp_path / "odd.bin", tmp_path / "empty.bin"
    odd.write_bytes(b"abc")
    empty.write_bytes(b"")
    good = write("good.bin", range(20))
    for path, said in (
        (tmp_path / "none.bin", "No such file"),
        (odd, "3 bytes of tokens, which is no multiple of the 2 bytes of a uint16"),
        (empty, "holds no tokens"),
        (tmp_path, "is a folder"),
    ):
        with pytest.raises(DataError, match=said) as raised:
            tokens([good, path], 4)
        assert str(path) in str(raised.value)
        assert raised.value.fix


@pytest.mark.parametrize("workers", [0, 1])
def test_a_token_outside_the_vocabulary_is_named_with_its_place(write: Write, workers: int) -> None:
    paths = [write("a.bin", [1, 2, 3, 4, 5]), write("b.bin", [1, 2, 3, 50, 5, 6])]
    loader = GlobalLoader(tokens(paths, 2, vocab=50), 2, num_workers=workers, feed=Feed())
    with pytest.raises(DataError, match=r"b\.bin has token 50 at place 3, and vocab=50\. Fix: give the vocabulary"):
        list(loader)
    with pytest.raises(DataError, match="has token -1 at place 2"):
        tokens(write("c.bin", [0, 1, -1], "int16"), 2, "int16", vocab=50)[0]


def test_a_file_that_was_cut_short_meanwhile_is_named(write: Write) -> None:
    path = write("a.bin", range(40))
    data = tokens(path, 4)
    write("a.bin", range(10))
    with pytest.raises(DataError, match=r"a\.bin has changed since the dataset was made"):
        data[0]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"block": 0}, "block=0"),
        ({"dtype": "float32"}, "dtype='float32': it is no integer type"),
        ({"dtype": "tokens"}, "dtype='tokens'"),
        ({"vocab": 0}, "vocab=0"),
        ({"header": -1}, "header=-1"),
    ],
)
def test_settings_that_cannot_work(write: Write, given: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingError, match=named):
        tokens(write("a.bin", range(40)), **given)
    with pytest.raises(SettingError, match="there is no file"):
        tokens([])


def test_workers_are_sent_no_copy_of_the_files(write: Write) -> None:
    data = tokens(write("a.bin", range(60_000)), 4)
    row = data[3]
    sent = pickle.dumps(data)
    assert len(sent) < 2000
    assert torch.equal(pickle.loads(sent)[3][0], row[0])
