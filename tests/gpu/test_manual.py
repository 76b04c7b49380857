"""Strategy `manual` on real cards: one card's training, `dp` to the bit for equal weights, shares found by timing."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manycard as mc
from manycard.engine.driving.card_times import MeasuredTimes
from tests.strategies.cases import CASES
from tests.strategies.reference import Outcome, train_in_groups
from tests.strategies.runs import RUNS
from tests.strategies.test_manual import interleaved

COUNTS = [count for count in (1, 2, 4, 8) if count <= torch.cuda.device_count()] or [1]
BY_NAME = {case.name: case for case in CASES}
WEIGHTS = {1: [3.0], 2: [3.0, 1.0], 4: [5.0, 2.0, 1.0, 3.0], 8: [5.0, 2.0, 1.0, 3.0, 1.0, 1.0, 4.0, 0.5]}
FEW = [
    "accumulate_adamw_clip_schedule",
    "last_batch_smaller_than_cards",
    "one_sample_in_all",
    "sometimes_unused_accumulated",
    "sync_batchnorm",
    "token_sums_few",
    "tied",
    "sparse_embedding",
    "two_optimizers",
]


@cache
def reference(name: str) -> Outcome:
    """One card's training."""
    return train_in_groups(BY_NAME[name], torch.float32, "cuda:0")


def same(actual: Outcome, expected: Outcome) -> None:
    """Losses, parameters, buffers and optimizer states to 1e-4."""
    torch.testing.assert_close(actual.losses, expected.losses, rtol=1e-4, atol=1e-4)
    assert actual.tensors.keys() == expected.tensors.keys()
    for key, tensor in expected.tensors.items():
        close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4, msg=lambda m, k=key: f"{k}: {m}")
        close(actual.tensors[key], tensor)


@pytest.mark.parametrize("cards", COUNTS)
@pytest.mark.parametrize("name", BY_NAME)
def test_training_by_weights_is_that_of_one_card(cards: int, name: str, tmp_path: Path) -> None:
    make = partial(mc.Parallel, "manual", cards=cards, weights=WEIGHTS[cards])
    same(RUNS[f"step/{name}/torch.float32"](make, tmp_path), reference(name))


@pytest.mark.parametrize("cards", COUNTS)
@pytest.mark.parametrize("name", FEW)
def test_training_by_a_split_is_that_of_one_card(cards: int, name: str, tmp_path: Path) -> None:
    make = partial(mc.Parallel, "manual", cards=cards, split=interleaved)
    same(RUNS[f"step/{name}/torch.float32"](make, tmp_path), reference(name))


@pytest.mark.parametrize("cards", COUNTS)
def test_resumes_bit_for_bit(cards: int, tmp_path: Path) -> None:
    result = RUNS["resume"](partial(mc.Parallel, "manual", cards=cards, weights=WEIGHTS[cards]), tmp_path)
    assert result["parted"] == result["straight"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.last = nn.Linear(16 * 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.conv(x))).flatten(1))


def mean_loss(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batches(count: int, samples: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(samples, 3, 8, 8, generator=generator), torch.randint(10, (samples,), generator=generator))
        for _ in range(count)
    ]


def trained(parallel: mc.Parallel, data: Sequence[Any], graphs: str, loss_fn: Any = mean_loss) -> tuple[Any, Any, Any]:
    """Losses, state, and the wrapped model after training."""
    torch.manual_seed(0)
    module = Net()
    model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), 0.05, momentum=0.9))
    step = parallel.train_step(loss_fn, model, optimizer, graphs=graphs, clip_norm=1.0)
    losses = torch.stack([step(batch) for batch in data]).tolist()
    parallel.check_lockstep(model)
    state = {name: value.cpu().clone() for name, value in module.state_dict().items()}
    return losses, state, model


@pytest.mark.parametrize("cards", COUNTS)
@pytest.mark.parametrize("graphs", ["off", "on"])
def test_equal_weights_are_dp_to_the_bit(cards: int, graphs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    data = batches(14, 8 * cards + 3)
    outcomes = []
    for settings in ({"strategy": "dp"}, {"strategy": "manual", "weights": [2] * cards}):
        parallel = mc.Parallel(**settings, cards=cards, precision="fp32")
        outcomes.append(trained(parallel, data, graphs)[:2])
        parallel.close()
    (losses, state), (other_losses, other_state) = outcomes
    assert losses == other_losses
    assert all(torch.equal(state[name], value) for name, value in other_state.items())


@pytest.mark.parametrize("cards", [count for count in COUNTS if count > 1])
def test_uneven_weights_run_as_graphs(cards: int) -> None:
    data = batches(14, 16 * cards)
    outcomes = []
    for graphs in ("off", "on"):
        parallel = mc.Parallel("manual", cards=cards, weights=WEIGHTS[cards], precision="fp32")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            outcomes.append(trained(parallel, data, graphs)[:2])
        parallel.close()
    torch.testing.assert_close(outcomes[0], outcomes[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cards", [count for count in COUNTS if count > 1])
def test_steps_in_which_a_card_gets_nothing_run_eager_and_say_so(cards: int) -> None:
    parallel = mc.Parallel("manual", cards=cards, weights=[1000.0] + [1.0] * (cards - 1))
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        trained(parallel, batches(6, 8), "auto")
    parallel.close()


@pytest.mark.parametrize("cards", [count for count in COUNTS if count > 1])
def test_split_calls_merge_with_gradients(cards: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    alone = copy.deepcopy(module).to("cuda:0")
    parallel = mc.Parallel("manual", cards=cards, split=interleaved, merge=uninterleaved_on_primary)
    model = parallel.setup(module)
    x = torch.randn(13, 6, device="cuda:0", requires_grad=True)
    ours, theirs = model(x), alone(x)
    torch.testing.assert_close(ours, theirs)
    for out, network in ((ours, module), (theirs, alone)):
        out.square().mean().backward()
        network.kept = [parameter.grad.clone() for parameter in network.parameters()]
    torch.testing.assert_close(module.kept, alone.kept)
    parallel.close()


def uninterleaved_on_primary(outputs: list[Any]) -> Tensor:
    assert all(output is None or output.device.index == 0 for output in outputs)
    there = [output for output in outputs if output is not None]
    rows = torch.arange(sum(map(len, there))).flip(0)
    order = torch.cat([rows[card :: len(outputs)] for card in range(len(outputs))])
    return torch.cat(there)[order.argsort().to(there[0].device)]


def slowed_loss(slow: int, cycles: int) -> Any:
    """A loss that keeps one card busy for a time by each of its samples."""

    def loss_fn(model: Any, batch: Any) -> Tensor:
        loss = mean_loss(model, batch)
        of_card = cycles * (3 if batch[0].device.index == slow else 1)
        torch.cuda._sleep(of_card * len(batch[0]))
        return loss

    return loss_fn


@pytest.mark.parametrize("cards", [count for count in COUNTS if count > 1])
@pytest.mark.parametrize("graphs", ["off", "auto"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_auto_gives_a_slow_card_less(cards: int, graphs: str, accumulate: int) -> None:
    """The cards' own work takes most of a step, so how fast the host is doesn't matter."""
    samples = 16 * cards
    parallel = mc.Parallel("manual", cards=cards, weights="auto", accumulate=accumulate, precision="fp32")
    data = batches(1, samples) * (80 * accumulate)
    _, _, model = trained(parallel, data, graphs, slowed_loss(cards - 1, 400_000))
    shares = parallel.strategy.shares(model)
    assert shares is not None
    wanted = 1 / 3 / (cards - 1 + 1 / 3)
    assert shares[-1] == pytest.approx(wanted, rel=0.25)
    assert all(share == pytest.approx(3 * wanted, rel=0.25) for share in shares[:-1])
    parallel.close()


@pytest.mark.parametrize("cards", COUNTS)
def test_taking_times_waits_for_no_card(cards: int) -> None:
    """The host is done with many steps while the first card still computes the first."""
    parallel = mc.Parallel("manual", cards=cards, weights="auto", precision="fp32")
    torch.manual_seed(0)
    module = Net()
    model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), 0.05))
    step = parallel.train_step(mean_loss, model, optimizer, graphs="off")
    (batch,) = batches(1, 4 * cards)
    batch = tuple(part.to("cuda:0") for part in batch)
    for _ in range(12):  # the first ones wait for a comparison of the replicas
        step(batch)
    torch.cuda.synchronize(0)
    begin = time.perf_counter()
    torch.cuda._sleep(4_000_000_000)  # about two seconds
    for _ in range(3):
        step(batch)
    given = time.perf_counter() - begin
    torch.cuda.synchronize(0)
    took = time.perf_counter() - begin
    assert given < took / 2
    parallel.close()


@pytest.mark.parametrize("cards", COUNTS)
def test_memory_of_a_sample_is_noted(cards: int) -> None:
    parallel = mc.Parallel("manual", cards=cards, weights=[1] * cards, precision="fp32")
    torch.manual_seed(0)
    module = Net()
    model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), 0.05))
    step = parallel.train_step(mean_loss, model, optimizer, graphs="off")
    times = model.engine.times = MeasuredTimes(model.engine.cards)
    (batch,) = batches(1, 64 * cards)
    for _ in range(3):
        step(batch)
    for card, most in zip(model.engine.cards, times.most_samples(), strict=True):
        free, _ = torch.cuda.mem_get_info(card.device)
        held_by_a_sample = 16 * 64 * 4  # what relu keeps, at the least
        assert 64 < most < (free + torch.cuda.memory_reserved(card.device)) / held_by_a_sample
    parallel.close()


@pytest.mark.parametrize("cards", [count for count in COUNTS if count > 1])
def test_a_card_that_runs_out_of_memory_gets_less(cards: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 65536), nn.ReLU(), nn.Linear(65536, 1))
    alone = copy.deepcopy(module).to("cuda:0")
    last = torch.device("cuda", cards - 1)
    parallel = mc.Parallel("manual", cards=cards, weights="auto", precision="fp32")
    model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), 0.0))
    step = parallel.train_step(lambda model, batch: model(batch).square().mean(), model, optimizer, check_loss=False)
    step(torch.zeros(cards, 64))
    total = torch.cuda.get_device_properties(last).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(last) + 700 * 2**20) / total, last)
    try:
        x = torch.randn(2048 * cards, 64)  # 2048 samples need three times 512 MiB
        loss = step(x)
        torch.testing.assert_close(loss, alone(x.to("cuda:0")).square().mean().detach(), rtol=1e-3, atol=1e-5)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, last)
    shares = parallel.strategy.shares(model)
    assert shares is not None
    assert shares[-1] < 0.8 / cards
    parallel.check_lockstep(model)
    parallel.close()
