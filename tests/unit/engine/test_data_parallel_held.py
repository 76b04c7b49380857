"""What modules hold besides their tensors: copied around by `mc.DataParallel`, or refused by name."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manycard.errors import ModelError
from tests.strategies.models import Net

from .twins import batch, close, same_state, spread, train, twins


class Holding(Net):
    """Holds something besides tensors."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


class Counter:
    """Can't be copied, and has a lock as its reason."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0


@pytest.mark.parametrize(
    "make",
    [
        threading.Lock,
        threading.RLock,
        threading.local,
        lambda: [threading.Lock()],
        Counter,
        torch.Generator,
        lambda: open(__file__),  # noqa: SIM115 - closed by the test
        lambda: torch.get_default_dtype(),
        lambda: torch.nn.functional.relu,
        lambda: Path(__file__),
    ],
    ids=[
        "lock",
        "rlock",
        "local",
        "list of locks",
        "object with a lock",
        "generator",
        "file",
        "dtype",
        "function",
        "path",
    ],
)
def test_modules_that_hold_what_can_not_be_copied(make: Any) -> None:
    held = make()
    try:
        torch.manual_seed(0)
        alone = Net().double()
        torch.manual_seed(0)
        together = spread(Holding(held).double())
        train(alone, together)
        assert together.module.held is held
    finally:
        getattr(held, "close", lambda: None)()


class Uncopyable:
    """Refuses to be copied."""

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError("there can be only one")

    def __copy__(self) -> NoReturn:
        raise TypeError("there can be only one")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("there can be only one")


def test_an_attribute_that_can_not_be_copied_is_named() -> None:
    module = nn.Sequential(Net(), Net())
    module[1].connection = Uncopyable()
    with pytest.raises(ModelError, match=r"1\.connection") as caught:
        spread(module.double())(batch(7))
    assert "Fix:" in str(caught.value)


def test_a_python_generator_is_named() -> None:
    with pytest.raises(ModelError, match="held"):
        spread(Holding(x for x in [1, 2]).double())(batch(7))


class Capturing(Net):
    """A closure holds a parameter, so copies of the module would go on using the first card's."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.head.weight
        self.again = lambda hidden: hidden @ weight.t()

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.body(x))


def test_a_parameter_in_a_closure_is_refused() -> None:
    """Report kind dp-params-stale."""
    module = Capturing().double()
    with pytest.raises(ModelError, match="again") as caught:
        spread(module)(batch(7))
    assert "Fix:" in str(caught.value)


def test_one_card_takes_a_parameter_in_a_closure() -> None:
    torch.manual_seed(0)
    module = Capturing().double()
    expected = module(batch(7))
    close(spread(module, 1)(batch(7)), expected)


class Aliased(Net):
    """Parameters are kept in plain attributes too; copies must use their own."""

    def __init__(self) -> None:
        super().__init__()
        self.aliases = {"weight": [self.head.weight]}

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) @ self.aliases["weight"][0].t()


def test_parameters_in_plain_attributes_follow() -> None:
    torch.manual_seed(0)
    alone = Aliased()
    torch.manual_seed(0)
    together = spread(Aliased())
    for model in (alone, together):
        for step in range(3):
            y = model(batch(7, seed=step).float())
            model.zero_grad()
            y.square().mean().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    for mine, theirs in zip(alone.parameters(), together.module.parameters(), strict=True):
        torch.testing.assert_close(theirs, mine)


OUTSIDE = nn.Linear(8, 3).double()


class Global(Net):
    """Uses a parameter that is no part of it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.body(x), OUTSIDE.weight)


def test_a_parameter_that_is_no_part_of_the_module_is_right_or_refused() -> None:
    """Report kind unwrapped-params: its gradient must not be lost in silence."""
    alone, together = twins(Global)
    outside = OUTSIDE.weight
    alone(batch(7)).square().mean().backward()
    expected, outside.grad = outside.grad, None
    try:
        together(batch(7)).square().mean().backward()
        close(outside.grad, expected)
        same_state(alone, together)
    except ModelError as refused:
        assert "Fix:" in str(refused)  # noqa: PT017 - either outcome is right
    finally:
        outside.grad = None
