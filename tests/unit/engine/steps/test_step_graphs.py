"""What a train step records and replays: the bookkeeping around CUDA graphs, with a recorder that runs on the CPU."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manycard.cards import choose_cards
from manycard.data import Feed
from manycard.errors import GraphError, SettingError
from manycard.precision import make_precision
from manycard.strategies import StrategyOptions, make_strategy
from manycard.strategies.train_step import TrainStep, TrainStepSettings
from tests.unit.engine.repeating import Repeating


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, bias=False)  # a bias before BatchNorm has gradients of rounding only
        self.norm = nn.BatchNorm1d(8)
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


def mean_loss(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def sum_loss(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    counted = batch[1] > 0
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (loss * counted).sum(), counted.sum()


def make(
    cards: int, record: bool, *, model: nn.Module, loss_fn: Any = mean_loss, optimizer: Any = None, **settings: Any
) -> tuple[TrainStep, Any, Any, list[Repeating]]:
    model = copy.deepcopy(model)
    make_optimizer = optimizer or (lambda parameters: torch.optim.Adam(parameters, 1e-2, fused=True))
    own = make_optimizer(model.parameters())
    strategy = make_strategy(
        "dp", choose_cards(f"cpu:{cards}").cards, make_precision("fp32"), Feed(), StrategyOptions()
    )
    spread = strategy.setup_module(model)
    strategy.setup_optimizer(spread, own)
    engine = spread.engine

    def protected() -> list[Tensor]:
        tensors = [t for module in engine.replicas.modules for t in (*module.parameters(), *module.buffers())]
        for mirror in engine.updates.mirrored.values():
            for each in mirror.optimizers:
                tensors += [v for state in each.state.values() for v in state.values() if isinstance(v, Tensor)]
        if engine._buckets is not None:
            tensors += [flat for flats in engine._buckets.flats for flat in flats.values()]
        return tensors

    recorders = [Repeating(protected, lambda at=at: engine.replicas.parameters[at]) for at in range(cards)]
    if record:
        engine._recorders = recorders
    step = TrainStep(strategy, loss_fn, spread, [own], None, TrainStepSettings(**settings))
    return step, spread, own, recorders


def batches(sizes: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for size in sizes:
        yield torch.randn(size, 6, generator=generator), torch.randint(4, (size,), generator=generator)


def trained(record: bool, cards: int, sizes: Sequence[int], between: Any = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = settings.pop("model", None) or Net()
    step, spread, optimizer, recorders = make(cards, record, model=model, **settings)
    torch.manual_seed(1)
    losses = []
    for number, batch in enumerate(batches(sizes)):
        losses.append(step(batch))
        if between is not None:
            between(number, spread, optimizer)
    spread.engine.replicas.check_lockstep()
    return losses, [*spread.module.parameters(), *spread.module.buffers()], recorders


@pytest.mark.parametrize("cards", [1, 2, 3])
@pytest.mark.parametrize("loss_fn", [mean_loss, sum_loss])
@pytest.mark.parametrize("settings", [{}, {"accumulate": 3}, {"clip_norm": 0.1, "accumulate": 2}], ids=str)
def test_replays_train_as_eager_passes_do(cards: int, loss_fn: Any, settings: dict[str, Any]) -> None:
    sizes = [12, 12, 12, 12, 7, 12, 12, 7, 12, 12, 6, 12, 7, 12]
    expected, wanted, _ = trained(False, cards, sizes, loss_fn=loss_fn, check_loss=False, **settings)
    actual, got, recorders = trained(True, cards, sizes, loss_fn=loss_fn, check_loss=False, **settings)
    assert all(recorder.replays >= 5 for recorder in recorders)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_a_list_of_losses_keeps_its_values() -> None:
    losses, _, _ = trained(True, 2, [8] * 12)
    assert len({float(loss) for loss in losses}) == 12


def test_learning_rates_reach_a_replay_and_stay_numbers_for_the_script() -> None:
    rates = []

    def halve(number: int, _: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.7
        rates.append(optimizer.param_groups[0]["lr"])
        assert optimizer.param_groups[0]["capturable"] is False

    _, wanted, _ = trained(False, 2, [8] * 10, between=halve)
    _, got, recorders = trained(True, 2, [8] * 10, between=halve)
    assert recorders[1].replays > 5
    assert all(isinstance(rate, float) for rate in rates)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def freeze(number: int, spread: Any, optimizer: Any) -> None:
    if number == 6:
        spread.module.first.requires_grad_(False)


def move_storage(number: int, spread: Any, optimizer: Any) -> None:
    if number == 6:
        spread.module.last.weight.data = spread.module.last.weight.data.clone()


def decay(number: int, spread: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.0 if number < 6 else 0.1


def reload(number: int, spread: Any, optimizer: Any) -> None:
    if number == 6:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def evaluate(number: int, spread: Any, optimizer: Any) -> None:
    spread.eval()
    with torch.no_grad():
        spread(torch.zeros(4, 6))
    spread.train()


def drop_gradients(number: int, spread: Any, optimizer: Any) -> None:
    optimizer.zero_grad()


@pytest.mark.parametrize("between", [freeze, move_storage, decay, reload, evaluate, drop_gradients])
def test_what_a_script_does_between_steps_is_followed(between: Any) -> None:
    _, wanted, _ = trained(False, 2, [8] * 14, between=between)
    _, got, recorders = trained(True, 2, [8] * 14, between=between)
    assert recorders[0].replays > 5
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


# ---- what stays eager ------------------------------------------------------------------------------------------


class Drawing(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 + random.random())


class Writing(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.newest = super().forward(x)
        return self.newest


class Replacing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return super().forward(x)


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last.register_forward_hook(lambda *_: None)


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 6, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.embedding(x.argmax(1) % 4))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Drawing, "draws at random on the host"),
        (Writing, "forward writes Writing.newest"),
        (Replacing, "forward replaces buffer seen"),
        (Hooked, "a hook of last would not run"),
        (Sparse, "the gradient of embedding.weight is sparse"),
    ],
)
def test_what_a_graph_cannot_repeat_is_named_and_runs_eager(kind: type[nn.Module], words: str) -> None:
    def sgd(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, 1e-2)

    with pytest.warns(UserWarning, match=words):
        trained(True, 2, [8] * 6, model=kind(), optimizer=sgd, check_loss=False)
    with pytest.raises(GraphError, match=words):
        trained(True, 2, [8] * 6, model=kind(), optimizer=sgd, check_loss=False, graphs="on")


def test_a_loss_that_changes_with_a_counter_in_python_is_found() -> None:
    counter = itertools.count()

    def loss_fn(model: Any, batch: Any) -> Tensor:
        factor = 1.0 + 0.1 * next(counter)
        return mean_loss(model, batch) * factor

    with pytest.warns(UserWarning, match="something in Python that changes from step to step"):
        trained(True, 1, [8] * 8, loss_fn=loss_fn, check_loss=False)


def test_an_optimizer_of_the_user_s_own_updates_eager() -> None:
    class Own(torch.optim.SGD):
        pass

    with pytest.warns(UserWarning, match="updates run without CUDA graphs: .* Own is none"):
        trained(True, 2, [8] * 8, optimizer=lambda parameters: Own(parameters, 1e-2))


def test_more_kinds_of_batches_than_graphs_run_eager() -> None:
    sizes = [4, 6, 8, 10, 12, 14, 16, 18, 20, 22] * 3
    _, wanted, _ = trained(False, 2, sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, got, _ = trained(True, 2, sizes)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_simulated_cards_have_no_graphs() -> None:
    with pytest.raises(SettingError, match="simulated cards have no CUDA graphs"):
        make(2, False, model=Net(), graphs="on")
