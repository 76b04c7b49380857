"""Profiles, memory and hangs on real cards, as many as there are: planted causes are named, healthy runs are not."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manycard as mc
from manycard.diagnosis.profile import PARTS, Profile
from manycard.diagnosis.profile.trace import read_trace

COUNTS = [count for count in (1, 2, 4, 8) if count <= max(torch.cuda.device_count(), 1)]
SEVERAL = [count for count in COUNTS if count > 1]
HANG = Path(__file__).parents[1] / "unit" / "hangs" / "ranks_hang.py"


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def wide() -> nn.Module:
    """Large matrix products: cards are what limits it."""
    return nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(4096, 4096), nn.GELU())))


def thin() -> nn.Module:
    """Many small kernels: the host is what limits it."""
    return nn.Sequential(*(part for _ in range(60) for part in (nn.Linear(64, 64), nn.Tanh())))


def profiled(
    count: int, net: nn.Module, width: int, tmp_path: Path, *, per_card: int = 2048, graphs: str = "auto", **more: Any
) -> Profile:
    parallel = mc.Parallel("dp", cards=count, seed=0)
    model, optimizer = parallel.setup(net, torch.optim.AdamW(net.parameters(), fused=True))
    step = parallel.train_step(loss_fn, model, optimizer, check_loss=False, graphs=graphs)
    batch = torch.randn(per_card * count, width, device=parallel.device)

    def batches() -> Iterable[Tensor]:
        for _ in range(60):
            yield batch

    profiling = parallel.profile(more.get("loader", batches()), skip=20, steps=6, out=str(tmp_path), say=False)
    for x in profiling:
        step(x)
        time.sleep(more.get("own", 0.0))
    parallel.close()
    assert profiling.result is not None
    return profiling.result


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_parts_add_up_and_cards_that_compute_have_no_finding(count: int, graphs: str, tmp_path: Path) -> None:
    found = profiled(count, wide(), 4096, tmp_path, per_card=8192, graphs=graphs)
    assert [card.card for card in found.cards] == [f"cuda:{index}" for index in range(count)]
    for card in found.cards:
        assert not card.simulated
        assert sum(getattr(card, name) for name in PARTS) == pytest.approx(card.step, rel=0.02)
        assert card.computing > 0.7 * card.step
        assert (card.reduce + card.reduce_hidden > 0) == (count > 1)
    unwanted = {"the host can't launch kernels fast enough", "the cards wait for data"}
    assert not unwanted & {each.finding.cause for each in found.opportunities}, str(found)


@pytest.mark.parametrize("count", COUNTS)
def test_a_host_bound_model_is_told_as_such(count: int, tmp_path: Path) -> None:
    found = profiled(count, thin(), 64, tmp_path, per_card=32, graphs="off")
    causes = {each.finding.cause for each in found.opportunities[:2]}
    assert "the host can't launch kernels fast enough" in causes, str(found)


@pytest.mark.parametrize("count", COUNTS)
def test_code_between_steps_is_told_as_such(count: int, tmp_path: Path) -> None:
    found = profiled(count, wide(), 4096, tmp_path, own=0.05)
    assert found.opportunities[0].finding.cause == "the cards wait for the script's own code between steps", str(found)


@pytest.mark.parametrize("count", COUNTS)
def test_a_slow_loader_is_told_as_such(count: int, tmp_path: Path) -> None:
    parallel = mc.Parallel("dp", cards=count, seed=0)
    net = nn.Linear(512, 512)
    model, optimizer = parallel.setup(net, torch.optim.AdamW(net.parameters()))
    step = parallel.train_step(loss_fn, model, optimizer, check_loss=False)

    class Slow(torch.utils.data.Dataset[Tensor]):
        def __len__(self) -> int:
            return 400

        def __getitem__(self, index: int) -> Tensor:
            time.sleep(0.005)
            return torch.zeros(512)

    profiling = parallel.profile(parallel.loader(Slow(), batch_size=8), out=str(tmp_path), say=False)
    for x in profiling:
        step(x)
    parallel.close()
    assert profiling.result is not None
    assert profiling.result.opportunities[0].finding.cause == "the cards wait for data"


@pytest.mark.parametrize("count", SEVERAL)
def test_the_first_card_that_has_the_loss_to_itself_is_named(count: int, tmp_path: Path) -> None:
    model = torch.nn.DataParallel(wide().cuda(), device_ids=list(range(count)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    parallel = mc.Parallel("single", cards=[0])
    batch = torch.randn(512 * count, 4096, device="cuda:0")
    with parallel.profile(skip=4, steps=4, out=str(tmp_path), say=False) as profiling:
        for _ in range(12):
            out = model(batch)
            for _ in range(20):
                out = out.softmax(1)
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert profiling.result is not None
    trace = read_trace(Path(profiling.result.traces[0]))
    assert len({kernel.card for kernel in trace.kernels}) == count


@pytest.mark.filterwarnings("ignore:memory grows")
@pytest.mark.parametrize("count", COUNTS)
def test_memory_of_each_card_and_a_leak_with_its_snapshot(count: int, tmp_path: Path) -> None:
    parallel = mc.Parallel("dp", cards=count, seed=0)
    net = nn.Linear(1024, 1024)
    model, optimizer = parallel.setup(net, torch.optim.AdamW(net.parameters()))
    step = parallel.train_step(loss_fn, model, optimizer, check_loss=False, graphs="off")
    outputs = []
    watch = parallel.watch_memory(every=8, snapshot=tmp_path / "memory.pickle")
    for _ in range(50):
        step(torch.randn(64, 1024, device=parallel.device))
        outputs.append(torch.zeros(2**18, device=parallel.device))
    watch.stop()
    assert "list `outputs` in test_profile.py" in watch.findings[0].cause
    assert pickle.loads((tmp_path / "memory.pickle").read_bytes())["segments"]
    report = parallel.memory()
    for card in report.cards:
        assert card.parameters == 4 * (1024 * 1024 + 1024)
        assert card.optimizer >= 2 * card.parameters
        assert card.peak >= card.held - card.other
    assert report.cards[0].other >= 50 * 2**20
    parallel.close()


@pytest.mark.parametrize("count", SEVERAL)
@pytest.mark.parametrize("kind", ["stuck", "skip"])
def test_ranks_that_hang_are_named(count: int, kind: str) -> None:
    words = [sys.executable, "-m", "manycard.cli", "run", "--strategy", "ddp", "--cards", str(count)]
    words += ["--hang-timeout", "3", str(HANG), kind]
    done = subprocess.run(words, capture_output=True, text=True, timeout=110, check=False, env={**os.environ})
    assert done.returncode == 1
    assert "the run hangs: no progress" in done.stderr
    assert "rank 1" in done.stderr
