"""CUDA graphs of a train step on real cards: the numbers of eager steps, and what can't be recorded said in words."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manycard as mc
from manycard.engine.recording.recorder import CudaRecorder
from manycard.errors import GraphError
from tests.gpu.convolutional import Net

COUNTS = [count for count in (1, 2, 4, 8) if count <= torch.cuda.device_count()] or [1]


def mean_loss(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def sum_loss(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    counted = batch[1] > 0
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (loss * counted).sum(), counted.sum()


def batches(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(size, 3, 8, 8, generator=generator), torch.randint(10, (size,), generator=generator))
        for size in sizes
    ]


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=1e-3)


def trained(
    graphs: str,
    cards: int,
    *,
    sizes: Any = (16,) * 14,
    loss_fn: Any = mean_loss,
    optimizer: Any = sgd,
    schedule: bool = True,
    between: Any = None,
    precision: str = "fp32",
    model: nn.Module | None = None,
    accumulate: int = 1,
    compile: bool = False,
    **settings: Any,
) -> tuple[list[float], list[Tensor], Any, Any]:
    torch.manual_seed(0)
    parallel = mc.Parallel(
        strategy="dp", cards=list(range(cards)), precision=precision, accumulate=accumulate, seed=0, compile=compile
    )
    net = copy.deepcopy(model) if model is not None else Net()
    own = optimizer(net.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(own, 0.9) if schedule else None
    net, own = parallel.setup(net, own)
    step = parallel.train_step(loss_fn, net, own, graphs=graphs, scheduler=scheduler, **settings)
    losses = []
    for number, batch in enumerate(batches(list(sizes))):
        losses.append(step(batch))
        if between is not None:
            between(number, net, own)
    parallel.check_lockstep(net)
    state = [tensor.detach().clone() for tensor in (*net.module.parameters(), *net.module.buffers())]
    parallel.close()
    return [float(loss) for loss in losses], state, own, step


def compare(cards: int, rtol: float = 1e-4, **settings: Any) -> Any:
    expected, wanted, _, _ = trained("off", cards, **settings)
    actual, got, own, _ = trained("on", cards, **settings)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol)
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=rtol)
    return own


@pytest.mark.parametrize("cards", COUNTS)
@pytest.mark.parametrize("loss_fn", [mean_loss, sum_loss])
@pytest.mark.parametrize(
    "settings", [{}, {"accumulate": 3}, {"clip_norm": 0.5, "accumulate": 2}, {"precision": "fp16"}], ids=str
)
def test_replays_train_as_eager_steps_do(cards: int, loss_fn: Any, settings: dict[str, Any]) -> None:
    rtol = 1e-4 if "precision" not in settings else 2e-2
    sizes = [32, 32, 32, 32, 18, 32, 32, 18, 32, 32, 16, 32, 18, 32]
    compare(cards, rtol, loss_fn=loss_fn, sizes=sizes, check_loss=False, **settings)


@pytest.mark.parametrize("cards", COUNTS)
def test_dropout_draws_as_eager_steps_do_and_anew_in_each_replay(cards: int) -> None:
    compare(cards, model=Net(dropout=0.5))
    losses, _, _, _ = trained("on", cards, model=Net(dropout=0.5), optimizer=lambda p: torch.optim.SGD(p, 0.0))
    same = trained("on", cards, sizes=[16] * 14, optimizer=lambda p: torch.optim.SGD(p, 0.0))[0]
    assert len(set(losses)) == len(losses)
    assert len(set(same)) == len(same)  # other batches give other losses: each is a tensor of its own


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-2),
    "adamw fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adamw single": lambda p: torch.optim.AdamW(p, 1e-2, foreach=False, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, 1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, 1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3),
    "rprop": lambda p: torch.optim.Rprop(p, 1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_update_in_a_graph_as_they_do_alone(name: str) -> None:
    own = compare(COUNTS[-1], 1e-3, optimizer=OPTIMIZERS[name])
    assert isinstance(own.param_groups[0]["lr"], float)
    assert not own.param_groups[0].get("capturable", False)


def average(number: int, net: Any, own: Any) -> None:
    if number == 0:
        net.module.__dict__["average"] = None
    if number % 5 == 4:
        net.eval()
        with torch.no_grad():
            net(torch.zeros(8, 3, 8, 8, device="cuda"))
        net.train()


def test_evaluation_between_steps_changes_nothing() -> None:
    compare(COUNTS[-1], between=average)


def test_compiled_modules_are_recorded() -> None:
    compare(COUNTS[-1], 1e-3, compile=True)


def waiting(model: Any, batch: Any) -> Tensor:
    loss = mean_loss(model, batch)
    return loss * 2 if loss.item() > 1e6 else loss


def copying(model: Any, batch: Any) -> Tensor:
    return mean_loss(model, batch) * torch.tensor([1.0], device=batch[0].device).squeeze()


@pytest.mark.parametrize("loss_fn", [waiting, copying])
def test_waiting_for_the_card_is_named_by_its_line(loss_fn: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses, _, _, _ = trained("auto", COUNTS[-1], loss_fn=loss_fn, model=Net(dropout=0.5))
    said = [str(warning.message) for warning in caught if "without CUDA graphs" in str(warning.message)]
    if loss_fn is waiting:
        assert any("test_graphs.py" in text and "loss.item()" in text for text in said), said
    assert len(set(losses)) == len(losses)
    if said:
        with pytest.raises(GraphError, match="graphs"):
            trained("on", COUNTS[-1], loss_fn=loss_fn)


def test_a_recording_that_fails_leaves_the_card_as_it_was() -> None:
    device = torch.device("cuda", 0)
    recorder = CudaRecorder(device)
    x = torch.ones(4, device=device)

    def work() -> float:
        return nn.functional.dropout(x * 2).sum().item()

    with pytest.raises(RuntimeError):
        recorder.record(work)
    torch.manual_seed(0)
    first = nn.functional.dropout(torch.ones(1000, device=device))
    torch.manual_seed(0)
    assert torch.equal(first, nn.functional.dropout(torch.ones(1000, device=device)))
    held = torch.zeros(4, device=device)
    replay, _ = recorder.record(lambda: held.copy_(x * 3))
    replay()
    torch.testing.assert_close(held, torch.full((4,), 3.0, device=device))


def test_graphs_that_draw_outlive_a_recording_that_fails() -> None:
    """As with two models in one script, of which one can't be recorded."""
    device = torch.device("cuda", 0)
    recorder, other = CudaRecorder(device), CudaRecorder(device)
    held, x = torch.zeros(1000, device=device), torch.ones(1000, device=device)
    replay, _ = recorder.record(lambda: held.copy_(nn.functional.dropout(x)))
    with pytest.raises(RuntimeError):
        other.record(lambda: nn.functional.dropout(x).sum().item())
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        replay()
        drawn.append(held.clone())
        replay()
        assert not torch.equal(held, drawn[-1])
    assert torch.equal(*drawn)


def test_memory_does_not_grow_and_replicas_stay_equal_over_a_thousand_steps() -> None:
    parallel = mc.Parallel(strategy="dp", cards=list(range(COUNTS[-1])), precision="bf16", seed=0)
    net = Net(dropout=0.1)
    net, own = parallel.setup(net, torch.optim.AdamW(net.parameters(), 1e-3))
    step = parallel.train_step(mean_loss, net, own, graphs="on")
    (images, labels) = batches([32])[0]
    batch = images.cuda(), labels.cuda()
    for _ in range(100):
        step(batch)
    torch.cuda.synchronize()
    before = [torch.cuda.memory_reserved(card) for card in range(COUNTS[-1])]
    losses = [step(batch) for _ in range(900)]
    torch.cuda.synchronize()
    assert [torch.cuda.memory_reserved(card) for card in range(COUNTS[-1])] == before
    parallel.check_lockstep(net)
    assert float(losses[-1]) < float(losses[0])
    parallel.close()


def test_an_exception_in_the_loss_on_one_card_leaves_the_step_usable() -> None:
    fail = [False]

    def loss_fn(model: Any, batch: Any) -> Tensor:
        if fail[0] and batch[0].device.index == COUNTS[-1] - 1:
            raise ValueError("planted")
        return mean_loss(model, batch)

    parallel = mc.Parallel(strategy="dp", cards=list(range(COUNTS[-1])), seed=0)
    net = Net()
    net, own = parallel.setup(net, sgd(net.parameters()))
    step = parallel.train_step(loss_fn, net, own)
    regular, odd = batches([16, 10])
    for _ in range(8):
        step(regular)
    fail[0] = True
    with pytest.raises(ValueError, match="planted"):
        step(odd)
    fail[0] = False
    before = float(step(regular))
    assert float(step(regular)) < before
    parallel.check_lockstep(net)
    parallel.close()
