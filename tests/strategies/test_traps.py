"""The traps of one process, as `train_step` of the `dp` strategy meets them: modules, replicas, batches.

Rows of the table that `step` and the drop-in share are tested on both: here and in
tests/unit/engine/test_data_parallel_*.py.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, weight_norm

from manycard.errors import BatchError, ManycardError, ModelError

from .both import Both, Make, close, mse, rows
from .models import Net, SometimesUsed, TiedWords

# ---- tied weights, parametrizations, lazy modules -----------------------------------------------------------


def test_ties_are_kept_in_replicas(make: Make) -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        assert model.head.weight is model.embedding.weight
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten())

    both = Both(make, TiedWords, loss)
    for step in range(3):
        both.train((torch.randint(0, 11, (7, 7), generator=torch.Generator().manual_seed(step)),))
    both.check()
    assert both.module.head.weight is both.module.embedding.weight


def _old_weight_norm() -> nn.Module:
    net = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        weight_norm(net.head)
    return net


def _parametrized(name: str) -> Callable[[], nn.Module]:
    def make_model() -> nn.Module:
        net = Net()
        getattr(parametrizations, name)(net.head)
        return net

    return make_model


@pytest.mark.parametrize(
    "make_model",
    [_old_weight_norm, _parametrized("weight_norm"), _parametrized("spectral_norm"), _parametrized("orthogonal")],
    ids=["old_weight_norm", "weight_norm", "spectral_norm", "orthogonal"],
)
def test_reparametrized_weights_train(make: Make, make_model: Callable[[], nn.Module]) -> None:
    """Report kind dp-reparam."""
    both = Both(make, make_model)
    for step in range(3):
        both.train(rows(7, step))
    both.check()


def test_lazy_modules_are_initialised_once(make: Make) -> None:
    parallel = make()
    module = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3)).double()
    torch.manual_seed(0)
    module(rows(2)[0])  # the optimizer needs parameters, on one card as well
    model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    step = parallel.train_step(mse, model, optimizer)
    assert float(step(rows(7))) > float(step(rows(7)))
    parallel.check_lockstep(model)


# ---- modules that can't be copied ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "held", [threading.Lock, torch.Generator, lambda: [threading.RLock()]], ids=["lock", "generator", "list of a lock"]
)
def test_locks_and_generators_are_copied_around(make: Make, held: Callable[[], Any]) -> None:
    def make_model() -> nn.Module:
        net = Net()
        net.held = held()
        return net

    both = Both(make, make_model)
    both.train(rows(7))
    both.check()


class Unique:
    """Refuses to be copied."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("there can be only one")


def test_what_can_not_be_copied_is_named(make: Make) -> None:
    module = nn.Sequential(Net(), Net())
    module[1].connection = Unique()

    def train() -> None:
        parallel = make()
        model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        parallel.train_step(mse, model, optimizer)(tuple(part.float() for part in rows(6)))

    with pytest.raises(ModelError, match=r"1\.connection"):
        train()


def test_compiled_modules_train(make: Make) -> None:
    both = Both(make, Net)
    parallel = make()
    torch.manual_seed(0)
    inside = Net().double()
    model, optimizer = parallel.setup(
        torch.compile(inside, backend="eager"), torch.optim.SGD(inside.parameters(), lr=0.1, momentum=0.9)
    )
    step = parallel.train_step(mse, model, optimizer)
    for number in range(3):
        both.train(rows(7, number))
        step(rows(7, number))
    for name, tensor in both.alone.state_dict().items():
        close(inside.state_dict()[name], tensor, name)


# ---- buffers and Python attributes written in forward -------------------------------------------------------


class CountsInBuffers(Net):
    """Counts its forwards in a buffer in place, in one that is re-assigned, and in Python; uses the buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("again", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.again = self.again + 1
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.count + 0.01 * self.again)


class Counts(CountsInBuffers):
    """Uses all three."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.001 * self.calls)


def test_state_written_in_forward_counts_each_step_once(make: Make) -> None:
    """Report kinds dp-state-lost, ddp-buffers."""
    both = Both(make, Counts)
    for step in range(4):
        both.train(rows(7, step))
    both.check()
    assert both.module.calls == both.alone.calls == 4
    assert both.parallel.strategy.unwrap(both.model) is both.module


def test_batches_that_leave_cards_idle_keep_state_together(make: Make) -> None:
    both = Both(make, CountsInBuffers)
    for step, samples in enumerate((7, 1, 7, 2, 7)):
        both.train(rows(samples, step))
    both.check()
    assert both.module.calls == both.alone.calls == 5


def test_python_state_that_differs_between_cards_is_said_once(make: Make, capfd: Any, recwarn: Any) -> None:
    class Rows(Net):
        seen_rows = 0

        def forward(self, x: Tensor) -> Tensor:
            self.seen_rows += len(x)
            return super().forward(x)

    both = Both(make, Rows)
    for step in range(3):
        both.train(rows(7, step))
    said = capfd.readouterr().err + "".join(str(warning.message) for warning in recwarn)
    assert said.count("seen_rows") == 1


def test_batchnorm_statistics_are_the_primarys(make: Make) -> None:
    """Report kind dp-bn-stats."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()
    line = nn.Linear(6, 3).double()
    line.load_state_dict(module[0].state_dict())
    norm = nn.BatchNorm1d(3).double()
    parallel = make()
    model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.0))
    step = parallel.train_step(mse, model, optimizer)
    loader = parallel.loader([tuple(part[0] for part in rows(1, seed)) for seed in range(9)], batch_size=9)
    for _ in range(3):
        for batch in loader:
            step(batch)
            norm(line(batch[0][:3]))
    close(module[1].running_mean, norm.running_mean, "mean")
    close(module[1].running_var, norm.running_var, "variance")

    def metric(model: Any, batch: Any) -> dict[str, Any]:
        return {"mse": (F.mse_loss(model(batch[0]), batch[1], reduction="sum"), batch[1].numel())}

    metrics = parallel.evaluate(metric, model, loader)
    x, y = next(iter(loader))
    assert metrics["mse"] == pytest.approx(float(F.mse_loss(norm.eval()(line(x)), y)), rel=1e-9)


# ---- replicas that go stale ---------------------------------------------------------------------------------


class Adjustable(Net):
    """A module with what people change while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8).eval()
        self.drop = nn.Dropout(1.0).eval()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.body(x)))) * self.scale


def _clamp(module: Any) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.1, 0.1)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a dropout that drops all": lambda module: module.drop.train(),
    "frozen layer": lambda module: module.body.requires_grad_(False),
    "an attribute": lambda module: setattr(module, "scale", 3.0),
    "a layer's setting": lambda module: setattr(module.norm, "eps", 10.0),
    "statistics": lambda module: module.norm.running_mean.add_(1),
    "p.data.clamp_": _clamp,
    "load_state_dict": lambda m: m.load_state_dict({k: v * 0.5 for k, v in m.state_dict().items()}),
    "another activation": lambda module: module.body.__setitem__(1, nn.Sigmoid()),
    "another forward": lambda module: setattr(module, "forward", lambda x: module.head(module.body(x)) * 5),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_steps_is_followed_or_refused(make: Make, name: str) -> None:
    """Report kind frozen-params among them."""
    both = Both(make, Adjustable)
    for step in range(4):
        if step == 2:
            CHANGES[name](both.alone)
            CHANGES[name](both.module)
        try:
            both.train(rows(7, step))
        except ManycardError as refused:
            if name not in ("another activation", "another forward"):
                raise
            assert refused.fix  # noqa: PT017 - either outcome is right
            return
    both.check()


# ---- zero_grad, unused parameters ---------------------------------------------------------------------------


@pytest.mark.parametrize("to_none", [True, False])
def test_a_script_may_drop_gradients_itself(make: Make, to_none: bool) -> None:
    both = Both(make, Net)
    for step in range(3):
        both.train(rows(7, step))
        both.theirs.zero_grad(set_to_none=to_none)
        for parameter in both.module.parameters():
            parameter.grad = None if to_none else parameter.grad
    both.check()


def test_an_unused_parameter_has_no_gradient_after_a_step(make: Make) -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x, x[:, 0] > 1e9), y)

    both = Both(make, SometimesUsed, loss)
    for step in range(2):
        both.train(rows(7, step))
        for name in ("never", "extra"):
            assert getattr(both.module, name).weight.grad is None
        assert both.module.head.weight.grad is not None
    both.check()
    assert both.module.never.weight not in both.theirs.state


# ---- batches ------------------------------------------------------------------------------------------------


@dataclass
class Fields:
    """A batch that is no pytree."""

    x: Tensor
    y: Tensor


class Holder:
    """Holds tensors where nothing can see them."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_dataclasses_dicts_of_their_own_kind_and_lists_of_samples(make: Make) -> None:
    class Kind(dict):
        pass

    def loss(model: Any, batch: Any) -> Tensor:
        if isinstance(batch, Fields):
            return F.mse_loss(model(batch.x), batch.y)
        if isinstance(batch, Kind):
            return F.mse_loss(model(batch["x"]), batch["y"])
        return torch.stack([F.mse_loss(model(sample), sample[:, :3]) for sample in batch]).mean()

    both = Both(make, Net, loss)
    x, y = rows(7)
    for batch in (Fields(x, y), Kind(x=x, y=y), [x[: 1 + index] for index in range(5)]):
        both.train(batch)
    both.check()


def test_an_unknown_holder_of_tensors_is_refused_and_the_next_step_works(make: Make) -> None:
    both = Both(make, Net)
    with pytest.raises(BatchError, match="Holder"):
        both.step((rows(6)[0], Holder(rows(6)[1])))
    both.train(rows(6))
    both.check()
