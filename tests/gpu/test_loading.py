"""Batches on their way to a real card: beside the computing, never waited for by the host, never overwritten."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import manycard as mc
from manycard.data.transfer import CudaTransfer, make_transfer

SECONDS = 0.3


def _busy(seconds: float = SECONDS) -> None:
    """Give the current stream work for about that long."""
    torch.cuda._sleep(int(seconds * 1.5e9))


@pytest.fixture
def transfer() -> CudaTransfer:
    made = make_transfer(torch.device("cuda", 0))
    assert isinstance(made, CudaTransfer)
    assert made.ahead
    return made


def test_a_copy_passes_beside_the_computing(transfer: CudaTransfer) -> None:
    batch = torch.arange(1 << 20, dtype=torch.float32).pin_memory()
    torch.cuda.synchronize()
    _busy()
    start = time.monotonic()
    sent = transfer.send(batch)
    sent[1].synchronize()
    assert time.monotonic() - start < SECONDS / 2, "the copy waited for the current stream"
    assert not torch.cuda.current_stream().query(), "the current stream is still busy"
    got = transfer.receive(sent)
    torch.testing.assert_close(got.cpu(), batch)


def test_the_stream_that_receives_waits_for_the_copy(transfer: CudaTransfer) -> None:
    batch = torch.ones(1 << 22).pin_memory()
    with torch.cuda.stream(transfer._stream):
        _busy()
    got = transfer.receive(transfer.send(batch))
    assert float(got.sum()) == 1 << 22


def test_memory_is_not_used_again_while_a_step_still_reads_it(transfer: CudaTransfer) -> None:
    sums = []
    for number in range(1, 9):
        got = transfer.receive(transfer.send(torch.full((1 << 20,), float(number)).pin_memory()))
        _busy(0.05)
        sums.append(got.sum())
        del got
    assert [int(total) for total in sums] == [number << 20 for number in range(1, 9)]


def test_pinned_memory_is_not_used_again_before_its_copy_is_done(transfer: CudaTransfer) -> None:
    with torch.cuda.stream(transfer._stream):
        _busy()
    sent = [transfer.send(torch.full((1 << 20,), float(number)).pin_memory()) for number in range(4)]
    assert [int(transfer.receive(each)[0]) for each in sent] == list(range(4))


class Hidden:
    """A holder of tensors that moves itself, with no tensor in sight."""

    __slots__ = ("inside",)

    def __init__(self, inside: torch.Tensor) -> None:
        self.inside = inside

    def to(self, device: torch.device) -> Any:
        return Hidden(self.inside.to(device))


def test_what_can_not_be_seen_or_is_there_already_moves_on_the_current_stream(transfer: CudaTransfer) -> None:
    for batch in (Hidden(torch.ones(3)), [torch.ones(3), torch.ones(3, device="cuda:0")]):
        assert transfer.send(batch)[1] is None
    got = transfer.receive(transfer.send({"x": torch.ones(3), "name": "a", "n": 3}))
    assert got["x"].is_cuda
    assert (got["name"], got["n"]) == ("a", 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_pinned_batches_without_waiting_for_the_card(workers: int) -> None:
    data = TensorDataset(torch.arange(4096.0).view(64, 64), torch.arange(64))
    parallel = mc.Parallel("single", cards="0,", seed=1)
    loader = parallel.loader(data, 8, shuffle=True, num_workers=workers, pin_memory=True)
    expected = parallel.loader(data, 8, shuffle=True, to_card=False)
    seen: list[Any] = []
    try:
        for batch in loader:
            torch.cuda.set_sync_debug_mode("error")
            _busy(0.01)
            seen.append([part * 1 for part in batch])
            torch.cuda.set_sync_debug_mode("default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for got, wanted in zip(seen, expected, strict=True):
        for one, other in zip(got, wanted, strict=True):
            assert one.is_cuda
            assert torch.equal(one.cpu(), other)
    parallel.close()


def test_pinning_is_the_default_where_workers_load_for_a_card() -> None:
    parallel = mc.Parallel("single", cards="0,")
    loader = parallel.loader(TensorDataset(torch.zeros(8, 2)), 4, num_workers=1)
    assert loader._walk._loader.pin_memory
    assert len(list(loader)) == 2
    parallel.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_another_primary_card_leaves_card_0_alone() -> None:
    """The thread that pins memory belongs to the primary card, and makes no context on card 0."""
    parallel = mc.Parallel("dp", cards="1,")
    loader = parallel.loader(TensorDataset(torch.ones(8, 2)), 4, num_workers=1)
    before = torch.cuda.memory_reserved(0)
    assert [float(batch[0].sum()) for batch in loader] == [8.0, 8.0]
    assert all(batch[0].device.index == 1 for batch in loader)
    assert torch.cuda.memory_reserved(0) == before
    parallel.close()
