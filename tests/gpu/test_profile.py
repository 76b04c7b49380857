"""Profiles, memory and hangs on real cards, as many as there are: planted causes are named, healthy runs are not."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manycard as mc
from manycard.diagnosis.profile import PARTS, Profile, split_by_card

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


class Inside(nn.Module):
    """A model that computes its loss in forward, on each card."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return heavy(self.net(x)).unsqueeze(0)


def heavy(out: Tensor) -> Tensor:
    """A loss that takes about as long as the model."""
    for _ in range(30):
        out = out.softmax(1) * out
    return out.square().mean()


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("count", SEVERAL)
def test_a_first_card_that_has_the_loss_to_itself_is_named(count: int, inside: bool, tmp_path: Path) -> None:
    parallel = mc.Parallel("torch_dp", cards=count, seed=0)
    net: nn.Module = nn.Sequential(nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 4096))
    net = Inside(net) if inside else net
    model, optimizer = parallel.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).mean() if inside else heavy(model(x))

    step = parallel.train_step(loss, model, optimizer, check_loss=False)
    batch = torch.randn(4096 * count, 4096, device=parallel.device)
    with parallel.profile(skip=4, steps=4, out=str(tmp_path), say=False) as profiling:
        for _ in range(12):
            step(batch)
    report = parallel.memory()
    parallel.close()
    assert profiling.result is not None
    found = {each.finding.cause: each.finding for each in profiling.result.opportunities}
    memory = [finding for finding in report.findings if finding.cause.startswith("cuda:0 holds more than the other")]
    if inside:
        assert "cuda:0 holds the other cards back" not in found, str(profiling.result)
        return
    named = found["cuda:0 holds the other cards back"]
    assert "the loss outside of the model runs on that card alone" in named.evidence
    assert memory, str(report)
    assert "outputs are joined there, and the loss outside of the model is computed there" in memory[0].cause


@pytest.mark.parametrize("count", SEVERAL)
def test_reducing_that_nothing_hides_is_named_and_little_of_it_is_not(count: int, tmp_path: Path) -> None:
    cause = "adding up gradients holds the cards up"
    found = profiled(count, wide(), 4096, tmp_path / "small", per_card=8)
    assert cause in {each.finding.cause for each in found.opportunities}, str(found)
    assert min(card.reduce for card in found.cards) > 0.05 * found.cards[0].step
    found = profiled(count, wide(), 4096, tmp_path / "large", per_card=8192)
    assert cause not in {each.finding.cause for each in found.opportunities}, str(found)


@pytest.mark.parametrize("count", COUNTS)
def test_a_loader_that_keeps_up_is_not_named(count: int, tmp_path: Path) -> None:
    parallel = mc.Parallel("dp", cards=count, seed=0)
    net = wide()
    model, optimizer = parallel.setup(net, torch.optim.AdamW(net.parameters(), fused=True))

    def widened(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return model(batch[0].repeat(8, 512)).square().mean()

    step = parallel.train_step(widened, model, optimizer, check_loss=False)
    data = torch.utils.data.TensorDataset(torch.randn(40 * 256 * count, 8))
    loader = parallel.loader(data, batch_size=256 * count, num_workers=2)
    profiling = parallel.profile(loader, skip=12, out=str(tmp_path), say=False)
    for batch in profiling:
        step(batch)
    parallel.close()
    assert profiling.result is not None
    assert profiling.result.cards[0].computing > 0
    causes = {each.finding.cause for each in profiling.result.opportunities}
    assert "the cards wait for data" not in causes, str(profiling.result)


@pytest.fixture
def at_work_on_the_last() -> Iterator[str]:
    """A process that multiplies matrices on the last of two cards, in kernels of some milliseconds."""
    program = (
        "import time, torch; x = torch.randn(8192, 8192, device='cuda:1'); print('up', flush=True)\n"
        "end = time.time() + 100\n"
        "while time.time() < end:\n    for _ in range(20): y = x @ x\n    torch.cuda.synchronize(1)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "up"
    yield str(process.pid)
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA cards")
def test_a_card_that_another_process_holds_back_is_named(at_work_on_the_last: str, tmp_path: Path) -> None:
    found = profiled(2, wide(), 4096, tmp_path, per_card=8192)
    named = {each.finding.cause: each.finding for each in found.opportunities}
    assert "cuda:1 holds the other cards back" in named, str(found)
    # In a container the driver may tell nothing of processes; then the fix asks to look for them.
    seen = named["cuda:1 holds the other cards back"]
    assert "another process computes there too" in seen.evidence or "other processes" in seen.fix


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA cards")
def test_even_cards_hold_nobody_back(tmp_path: Path) -> None:
    found = profiled(2, wide(), 4096, tmp_path, per_card=8192)
    assert not [each for each in found.opportunities if "holds the other cards back" in each.finding.cause], str(found)


@pytest.mark.parametrize("count", SEVERAL)
def test_a_trace_a_card_holds_what_ran_there(count: int, tmp_path: Path) -> None:
    found = profiled(count, wide(), 4096, tmp_path, per_card=2048)
    files = split_by_card(Path(found.traces[0]), tmp_path / "cards")
    assert len(files) == count
    for place, path in enumerate(files):
        with gzip.open(path, "rt") as file:
            document = json.load(file)
        assert document["distributedInfo"]["rank"] == place
        kernels = [event for event in document["traceEvents"] if event.get("cat") == "kernel"]
        assert {event["args"]["device"] for event in kernels} == {place}
        assert all("stream" in event["args"] and "correlation" in event["args"] for event in kernels)


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
    assert "outputs.append(torch.zeros(2**18, device=parallel.device))" in watch.findings[0].evidence
    assert pickle.loads((tmp_path / "memory.pickle").read_bytes())["segments"]
    report = parallel.memory()
    assert report.findings == [] or count > 1, "one card has nothing to be uneven with"
    for card in report.cards:
        assert card.parameters == 4 * (1024 * 1024 + 1024)
        assert card.optimizer >= 2 * card.parameters
        assert card.peak >= card.held - card.other
    assert report.cards[0].other >= 50 * 2**20
    parallel.close()


@pytest.mark.parametrize("count", COUNTS)
def test_memory_that_only_moves_is_no_leak(count: int) -> None:
    parallel = mc.Parallel("dp", cards=count, seed=0)
    net = nn.Linear(1024, 1024)
    model, optimizer = parallel.setup(net, torch.optim.AdamW(net.parameters()))
    step = parallel.train_step(loss_fn, model, optimizer, check_loss=False)
    with parallel.watch_memory(every=8) as watch:
        newest: deque[Tensor] = deque(maxlen=3)
        for _ in range(60):
            newest.append(step(torch.randn(64, 1024, device=parallel.device)))
    parallel.close()
    assert watch.findings == []


@pytest.mark.parametrize("count", SEVERAL)
@pytest.mark.parametrize("kind", ["stuck", "skip"])
def test_ranks_that_hang_are_named(count: int, kind: str) -> None:
    words = [sys.executable, "-m", "manycard.cli", "run", "--strategy", "ddp", "--cards", str(count)]
    words += ["--hang-timeout", "3", str(HANG), kind]
    done = subprocess.run(words, capture_output=True, text=True, timeout=110, check=False, env={**os.environ})
    assert done.returncode == 1
    assert "the run hangs: no progress" in done.stderr
    assert "rank 1" in done.stderr
