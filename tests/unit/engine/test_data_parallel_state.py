"""Attributes, methods, state and Python values of a module in `mc.DataParallel` are the module's own."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.strategies.models import Net

from .twins import batch, close, same_state, spread, twins


class Rich(Net):
    """Has methods, attributes, properties and state."""

    def __init__(self) -> None:
        super().__init__()
        self.latent = 4
        self.calls = 0
        self.history: list[int] = []
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("total", torch.zeros(6))

    @property
    def width(self) -> int:
        return self.head.out_features

    def sample(self, count: int, *, scale: float = 1.0) -> Tensor:
        return self.head(torch.full((count, 8), scale, dtype=self.head.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(self.calls)
        self.count += 1
        self.total = self.total + 1
        return super().forward(x) * (1 + self.calls) + self.total[:3] * self.count


def test_methods_and_attributes_go_through_to_the_module() -> None:
    """Report kinds dp-attribute, dp-method-bypass, ddp-attribute."""
    alone, together = twins(Rich)
    assert together.latent == 4
    assert together.width == 3
    assert together.head is together.module.head
    close(together.sample(3, scale=0.5), alone.sample(3, scale=0.5))
    together.sample(3).sum().backward()
    assert together.module.head.weight.grad is not None


def test_a_missing_attribute_is_named() -> None:
    _, together = twins(Rich)
    with pytest.raises(AttributeError, match="latnet"):
        _ = together.latnet
    assert not hasattr(together, "latnet")


def test_python_state_and_buffers_survive_forwards_and_count_each_once() -> None:
    """Report kinds dp-state-lost, ddp-buffers: in place and re-assigned."""
    alone, together = twins(Rich)
    for step in range(4):
        close(together(batch(7, seed=step)), alone(batch(7, seed=step)))
    assert together.module.calls == 4
    assert together.module.history == [1, 2, 3, 4]
    assert int(together.module.count) == 4
    same_state(alone, together)


def test_buffers_survive_batches_that_leave_cards_idle() -> None:
    class Counts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            self.calls += 1
            return super().forward(x) * self.count

    alone, together = twins(Counts, 4)
    for step, samples in enumerate((1, 7, 2, 4)):
        close(together(batch(samples, seed=step)), alone(batch(samples, seed=step)))
    same_state(alone, together)
    assert together.module.calls == 4


def test_an_attribute_set_in_forward_is_there_afterwards() -> None:
    class Remembers(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.last_mean = float(x.detach().mean())
            return y

    _, together = twins(Remembers)
    x = batch(6)
    together(x)
    assert together.module.last_mean == pytest.approx(float(x[:2].mean()))
    together(x + 1)
    assert together.last_mean == pytest.approx(float(x[:2].mean()) + 1)


def test_python_state_that_differs_between_cards_is_said_once(capfd: Any, recwarn: Any) -> None:
    class DependsOnData(Net):
        seen_rows = 0

        def forward(self, x: Tensor) -> Tensor:
            self.seen_rows += len(x)
            return super().forward(x)

    _, together = twins(DependsOnData)
    for _ in range(3):
        together(batch(7))
    said = capfd.readouterr().err + "".join(str(warning.message) for warning in recwarn)
    assert said.count("seen_rows") == 1


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("fresh", [False, True])
def test_state_loads_with_and_without_the_prefix(prefix: str, fresh: bool) -> None:
    """Report kind module-prefix."""
    alone, together = twins(Net)
    if not fresh:
        together(batch(7))
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter.mul_(1.5)
    state = {f"{prefix}{name}": tensor for name, tensor in alone.state_dict().items()}
    missing, unexpected = together.load_state_dict(state)
    assert (missing, unexpected) == ([], [])
    close(together(batch(7)), alone(batch(7)))


def test_state_goes_round_through_a_file_to_one_card_and_back() -> None:
    alone, together = twins(Net)
    file = io.BytesIO()
    torch.save(together.module.state_dict(), file)
    file.seek(0)
    fresh = Net().double()
    fresh.load_state_dict(torch.load(file))
    close(fresh(batch(7)), alone(batch(7)))
    together.load_state_dict(together.state_dict())
    nn.DataParallel(Net().double()).load_state_dict({f"module.{k}": v for k, v in together.module.state_dict().items()})


def test_a_state_of_the_original_wrapper_loads() -> None:
    original = nn.DataParallel(Net().double())
    together = spread(Net().double())
    together.load_state_dict(original.state_dict())
    close(together(batch(7)), original.module(batch(7)))


def test_a_part_called_module_is_no_prefix() -> None:
    """Report kind auto-dp-surprise: an attribute named module fools tests for a wrapper."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x)

    alone, together = twins(Named)
    close(together(batch(7)), alone(batch(7)))
    for prefix in ("", "module."):
        state = {f"{prefix}{name}": tensor * 2 for name, tensor in alone.state_dict().items()}
        together.load_state_dict(state)
        close(together.module.module.weight.detach(), alone.module.weight.detach() * 2)


def test_missing_and_unexpected_keys_are_still_errors() -> None:
    _, together = twins(Net)
    state = together.module.state_dict()
    del state["head.bias"]
    with pytest.raises(RuntimeError, match=r"head\.bias"):
        together.load_state_dict(state)
    result = together.load_state_dict({**state, "module.other": torch.ones(1)}, strict=False)
    assert any("head.bias" in name for name in result.missing_keys)
    assert any("other" in name for name in result.unexpected_keys)


def test_a_copy_of_the_wrapper_is_a_wrapper_of_its_own() -> None:
    """Report kind ema: averaged models are deep copies."""
    alone, together = twins(Net)
    together(batch(7)).sum().backward()
    twin = copy.deepcopy(together)
    with torch.no_grad():
        for parameter in together.parameters():
            parameter.zero_()
    close(twin(batch(7)), alone(batch(7)))
    averaged = torch.optim.swa_utils.AveragedModel(twin)
    averaged.update_parameters(twin)
    close(averaged(batch(7)), alone(batch(7)))


def test_the_wrapper_can_be_pickled() -> None:
    alone, together = twins(Net)
    together(batch(7))
    file = io.BytesIO()
    torch.save(together, file)
    file.seek(0)
    close(torch.load(file, weights_only=False)(batch(7)), alone(batch(7)))


def test_modes_moves_and_listings_are_the_modules() -> None:
    _, together = twins(Net)
    assert together.eval() is together
    assert not together.module.training
    assert not together.module.body.training
    together.train()
    assert together.module.body.training
    assert [id(p) for p in together.parameters()] == [id(p) for p in together.module.parameters()]
    assert together.module in set(together.modules())
    assert isinstance(together, nn.Module)
    assert type(repr(together)) is str


def test_wrapping_changes_nothing_of_the_module() -> None:
    torch.manual_seed(0)
    module = Net().double()
    before = {name: (tensor, tensor.clone()) for name, tensor in module.state_dict(keep_vars=True).items()}
    state = torch.get_rng_state()
    together: Any = spread(module)
    assert torch.equal(torch.get_rng_state(), state)
    together(batch(7))
    assert together.module is module
    for name, tensor in module.state_dict(keep_vars=True).items():
        assert tensor is before[name][0]
        close(tensor.detach(), before[name][1].detach())
