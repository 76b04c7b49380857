"""``per_card_batch`` and ``accumulate="auto"``: batches in parts that fit, with the whole batch's gradient."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manycard as mc
from manycard.cards import choose_cards
from manycard.errors import CardsError, ModelError, SettingError
from manycard.launch import launch_script
from manycard.strategies.card_memory import SimulatedMemory, state_ratio, state_to_come
from manycard.strategies.in_parts import _promised

X = torch.randn(101, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 3)).double()


def mean_loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def sum_and_count(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    weights = 1.0 + batch[1].double()
    return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * weights).sum(), weights.sum()


def reference(loss_fn: Callable[..., Any], batches: list[Any], accumulate: int = 1) -> tuple[list[float], nn.Module]:
    """Plain PyTorch on whole batches."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for place in range(0, len(batches), accumulate):
        group = batches[place : place + accumulate]
        found = [loss_fn(model, batch) for batch in group]
        pairs = zip(found, group, strict=True)
        sums = [(loss * len(b[0]), len(b[0])) if isinstance(loss, Tensor) else loss for loss, b in pairs]
        optimizer.zero_grad()
        (sum(total for total, _ in sums) / sum(count for _, count in sums)).backward()
        optimizer.step()
        losses += [(total / count).item() for total, count in sums]
    return losses, model


def train(batches: list[Any], loss_fn: Callable[..., Any] = mean_loss, **settings: Any) -> tuple[list[float], Any, Any]:
    model = make_model()
    parallel = mc.Parallel(seed=0, **settings)
    spread, optimizer = parallel.setup(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    step = parallel.train_step(loss_fn, spread, optimizer)
    losses = [float(step(batch)) for batch in batches]
    parallel.close()
    return losses, step, model


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for own, their in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(own, their, rtol=1e-9, atol=1e-11)


@pytest.fixture(params=[("single", "cpu:1"), ("dp", "cpu:2"), ("dp", "cpu:3")], ids=str)
def spread(request: pytest.FixtureRequest) -> dict[str, str]:
    strategy, cards = request.param
    return {"strategy": strategy, "cards": cards}


@pytest.mark.parametrize("loss_fn", [mean_loss, sum_and_count])
def test_parts_of_a_given_size_train_as_the_whole_batch(spread: dict[str, str], loss_fn: Callable[..., Any]) -> None:
    batches = [(X, Y), (X[:30], Y[:30]), (X[:1], Y[:1])]
    expected, plain = reference(loss_fn, batches)
    losses, step, model = train(batches, loss_fn, per_card_batch=7, **spread)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert_same(model, plain)
    assert step.parts == 1  # of the last batch, which has one sample
    assert step.per_card_batch == 7


def test_parts_and_several_calls_for_one_update(spread: dict[str, str]) -> None:
    batches = [(X[:40], Y[:40]), (X[40:], Y[40:])] * 2
    expected, plain = reference(mean_loss, batches, accumulate=2)
    losses, step, model = train(batches, accumulate=2, per_card_batch=9, **spread)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert_same(model, plain)
    assert step.updated


@pytest.mark.parametrize("settings", [{"accumulate": "auto"}, {"per_card_batch": "auto"}], ids=str)
def test_auto_finds_what_fits_and_trains_as_the_whole_batch(
    spread: dict[str, str],
    settings: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MANYCARD_SIMULATED_MEMORY", "2650KiB")
    batches = [(X, Y)] * 3
    expected, plain = reference(mean_loss, batches)
    losses, step, model = train(batches, **settings, **spread)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert_same(model, plain)
    assert 1 < step.per_card_batch < 101 // int(spread["cards"][-1])
    assert step.parts > 1
    said = [line for line in capsys.readouterr().err.splitlines() if "per_card_batch auto" in line]
    assert len(said) == 1
    assert f"{step.per_card_batch} samples a card at once, a batch in {step.parts} parts" in said[0]


def test_auto_leaves_a_batch_whole_that_fits(spread: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYCARD_SIMULATED_MEMORY", "1GiB")
    assert train([(X, Y)], per_card_batch="auto", **spread)[1].parts == 1
    monkeypatch.delenv("MANYCARD_SIMULATED_MEMORY")
    assert train([(X, Y)], per_card_batch="auto", **spread)[1].parts == 1


def test_what_is_found_is_near_the_largest_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYCARD_SIMULATED_MEMORY", "2800KiB")
    found = train([(X, Y)], per_card_batch="auto", strategy="single", cards="cpu:1")[1].per_card_batch
    fits = _peak_of(found)
    assert fits <= 0.9 * 2800 * 2**10
    assert _peak_of(found + 3) > 0.9 * 2800 * 2**10


def _peak_of(samples: int) -> float:
    """Bytes of parameters, gradients, Adam's state and activations, by the simulated memory's own count."""
    model = make_model()
    memory = SimulatedMemory(choose_cards("cpu:1").cards, 2**40)
    memory.holds(model.parameters())
    memory.watched(mean_loss)(model, (X[:samples], Y[:samples])).backward()
    return memory.peaks()[0] + 2 * sum(p.nbytes for p in model.parameters())


def test_nothing_fits_is_said(spread: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYCARD_SIMULATED_MEMORY", "900KiB")
    with pytest.raises(ModelError, match="not even one sample"):
        train([(X, Y)], per_card_batch="auto", **spread)


# ---- a later batch that is larger --------------------------------------------------------------------------


class Tokens(nn.Module):
    """What it keeps grows with the length of its sequences; has dropout and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.drop(torch.tanh(self.table(tokens))).mean(1)
        return self.out(self.norm(hidden))


def _tokens(samples: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(50, (samples, length), generator=generator), torch.randint(3, (samples,), generator=generator)


def _train_tokens(batches: list[Any], **settings: Any) -> tuple[list[float], Any, nn.Module]:
    torch.manual_seed(3)
    model = Tokens()
    parallel = mc.Parallel(seed=5, **settings)
    spread, optimizer = parallel.setup(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    step = parallel.train_step(mean_loss, spread, optimizer, check_loss=False)
    losses = [float(step(batch)) for batch in batches]
    parallel.close()
    return losses, step, model


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_that_is_too_large_later_is_computed_anew_in_smaller_parts(
    spread: dict[str, str], accumulate: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cards = int(spread["cards"][-1])
    short, long = _tokens(16 * cards, 8), _tokens(16 * cards, 40)
    batches = [short] * accumulate + [short] * (accumulate - 1) + [long]
    monkeypatch.setenv("MANYCARD_SIMULATED_MEMORY", "90KiB")
    losses, step, model = _train_tokens(batches, accumulate=accumulate, per_card_batch="auto", **spread)
    assert step.per_card_batch < 16
    assert "out of memory with 16 samples a card at once" in capsys.readouterr().err
    # The same with room for everything: whole batches for the first update, then parts of what was found.
    monkeypatch.delenv("MANYCARD_SIMULATED_MEMORY")
    expected, plain = _with_parts_from(batches, accumulate, step.per_card_batch, spread)
    assert losses[:accumulate] == expected[:accumulate]
    assert losses[-1] == pytest.approx(expected[-1], abs=0)
    for own, their in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(own, their)


def _with_parts_from(
    batches: list[Any], accumulate: int, per_card: int, spread: dict[str, str]
) -> tuple[list[float], nn.Module]:
    torch.manual_seed(3)
    model = Tokens()
    parallel = mc.Parallel(seed=5, accumulate=accumulate, per_card_batch=10_000, **spread)
    wrapped, optimizer = parallel.setup(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    step = parallel.train_step(mean_loss, wrapped, optimizer, check_loss=False)
    losses = []
    for place, batch in enumerate(batches):
        if place == accumulate:
            step._in_parts.per_card = per_card  # type: ignore[union-attr]
        losses.append(float(step(batch)))
    parallel.close()
    return losses, model


# ---- ranks -------------------------------------------------------------------------------------------------

_RANKS = """
import json, sys
from pathlib import Path
import torch
sys.path.insert(0, {root!r})
import manycard as mc
from tests.strategies.test_in_parts import X, Y, make_model, mean_loss

class Loss:
    failed = False
    def __call__(self, model, batch):
        # On rank 1 alone, the second step runs out of memory once.
        if parallel.rank == 1 and step_number == 1 and not Loss.failed:
            Loss.failed = True
            raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED, planted")
        return mean_loss(model, batch)

model = make_model()
parallel = mc.Parallel("ddp", cards="cpu:2", seed=0, per_card_batch="auto")
spread, optimizer = parallel.setup(model, torch.optim.Adam(model.parameters(), lr=1e-2))
step = parallel.train_step(Loss(), spread, optimizer, check_loss=False)
loader = parallel.loader(torch.utils.data.TensorDataset(X, Y), batch_size=101)
losses, sizes = [], []
for step_number in range(3):
    for batch in loader:
        losses.append(float(step(batch)))
        sizes.append((step.per_card_batch, step.parts))
parallel.check_lockstep(spread)
if parallel.is_primary:
    state = {{name: value.tolist() for name, value in model.state_dict().items()}}
    Path({out!r}).write_text(json.dumps({{"losses": losses, "sizes": sizes, "state": state}}))
"""


def test_ranks_agree_and_recover_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, out = tmp_path / "ranks.py", tmp_path / "out.json"
    script.write_text(_RANKS.format(root=str(Path(__file__).parents[2]), out=str(out)))
    monkeypatch.setenv("MANYCARD_SIMULATED_MEMORY", "2650KiB")
    launch_script([str(script)], choose_cards("cpu:2").cards)
    found = json.loads(out.read_text())
    expected, plain = reference(mean_loss, [(X, Y)] * 3)
    assert found["losses"] == pytest.approx(expected, rel=1e-9)
    first, parts = found["sizes"][0]
    assert parts == -(-51 // first) > 1
    assert found["sizes"][1][0] == first // 2
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(torch.tensor(found["state"][name], dtype=value.dtype), value, rtol=1e-8, atol=1e-10)


# ---- settings and the parts of the search ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"per_card_batch": 0}, "per_card_batch=0"),
        ({"per_card_batch": "most"}, "per_card_batch='most'"),
        ({"accumulate": "some"}, "accumulate='some'"),
        ({"per_card_batch": "auto", "sync_batchnorm": True}, "sync_batchnorm"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        mc.Parallel("dp", cards="cpu:2", **settings)


def test_a_simulated_memory_must_be_an_amount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYCARD_SIMULATED_MEMORY", "much")
    with pytest.raises(CardsError, match="MANYCARD_SIMULATED_MEMORY='much'"):
        train([(X, Y)], strategy="dp", cards="cpu:2", per_card_batch="auto")


def test_an_optimizers_state_is_foreseen() -> None:
    model = nn.Linear(30, 10)
    size = sum(p.nbytes for p in model.parameters())
    adam, sgd = torch.optim.Adam(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert state_to_come([adam]) == 2 * size
    assert state_to_come([sgd]) == size
    assert state_ratio(torch.optim.SGD(model.parameters(), lr=0.1)) == 0
    model(torch.ones(1, 30)).sum().backward()
    adam.step()
    assert state_to_come([adam]) == 0


def test_two_peaks_promise_what_a_third_confirms() -> None:
    assert _promised(small=140, large=180, room=500, low=4, high=8) == 40  # 100 without samples, 10 for each
    assert _promised(small=140, large=180, room=90, low=4, high=8) == 1


@pytest.fixture(autouse=True)
def no_memory_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MANYCARD_SIMULATED_MEMORY", raising=False)
