"""What modules hold besides their tensors: copied around by `mc.DataParallel`, or refused by name."""

from __future__ import annotations

import functools
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


HELD: dict[str, Any] = {
    "lock": threading.Lock,
    "rlock": threading.RLock,
    "list of locks": lambda: [threading.Lock()],
    "generator": torch.Generator,
    "dtype": torch.get_default_dtype,
    "function": lambda: F.relu,
    "path": lambda: Path(__file__),
    "thread's own": threading.local,
    "object with a lock": Counter,
    "file": lambda: open(__file__),  # noqa: SIM115 - closed by the test
}


@pytest.mark.parametrize("name", HELD)
def test_modules_that_hold_what_can_not_be_copied(name: str) -> None:
    held = HELD[name]()
    torch.manual_seed(0)
    alone = Net().double()
    torch.manual_seed(0)
    together = spread(Holding(held).double())
    try:
        train(alone, together)
        assert together.module.held is held
    except ModelError as refused:
        assert "held" in str(refused)  # noqa: PT017 - either outcome is right
        assert name in ("thread's own", "object with a lock", "file"), "copied around"
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


class Box:
    """An object that holds a parameter."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.t()


def _closure(weight: Tensor) -> Any:
    return lambda hidden: hidden @ weight.t()


def _closure_of_a_list(weight: Tensor) -> Any:
    held = {"weights": [weight]}
    return lambda hidden: hidden @ held["weights"][0].t()


def _default_argument(weight: Tensor) -> Any:
    return lambda hidden, weight=weight: hidden @ weight.t()


def _partial(weight: Tensor) -> Any:
    return functools.partial(lambda weight, hidden: hidden @ weight.t(), weight)


def _closure_of_a_closure(weight: Tensor) -> Any:
    inner = _closure(weight)
    return lambda hidden: inner(hidden)


def _cached(weight: Tensor) -> Any:
    return functools.wraps(F.linear)(lambda hidden: F.linear(hidden, weight))


CAPTURES = {
    "closure": _closure,
    "closure over a list": _closure_of_a_list,
    "closure over a closure": _closure_of_a_closure,
    "default argument": _default_argument,
    "partial": _partial,
    "callable object": Box,
    "method of an object": lambda weight: Box(weight).__call__,
    "wrapped function": _cached,
    "list of closures": lambda weight: [_closure(weight)],
}


class Capturing(Net):
    """A function holds a parameter, so careless copies would go on using the first card's."""

    def __init__(self, capture: Any) -> None:
        super().__init__()
        self.again = capture(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        again = self.again[0] if isinstance(self.again, list) else self.again
        return again(self.body(x)) + self.head.bias


@pytest.mark.parametrize("name", CAPTURES)
def test_a_parameter_that_a_function_holds_is_the_cards_own_or_refused(name: str) -> None:
    """Report kind dp-params-stale."""
    alone, together = twins(lambda: Capturing(CAPTURES[name]))
    own = {id(parameter) for parameter in together.module.parameters()}
    used: list[int] = []

    def note(module: Any, args: Any, out: Tensor) -> None:
        used.append(len(own & {id(tensor) for tensor in _leaves(out.grad_fn)}))

    together.module.register_forward_hook(note)
    try:
        train(alone, together)
    except ModelError as refused:
        assert refused.fix  # noqa: PT017 - either outcome is right
        return
    assert set(used) <= {0, 6}, "other cards must not compute with the first card's parameters"
    assert sum(count > 0 for count in used) <= 3, "only the first card computes with them, once a step"


def _leaves(node: Any) -> list[Tensor]:
    """The parameters that a graph ends in."""
    found, queue, seen = [], [node], set()
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        queue.extend(parent for parent, _ in node.next_functions)
    return found


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
