"""What a model's forward pass calls, in order, and what each part costs: found by running it once on one card.

Behaviour:
    * One forward pass without gradients notes every call of a module, and where each parameter is first used. Nothing
      of it stays: buffers and random states are put back.
    * A model that is too large for the card is run module by module: each one's own parameters come when it is called
      and go when it has ended.
    * Costs are measured on the real inputs of each part, forward and backward, the fastest of a few times. What forward
      keeps for backward is counted by its bytes, each storage once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from manycard.cards.card import Card
from manycard.engine.recording.recorder import without_autocast_cache
from manycard.pipeline.passage import map_known, refuse_differentiating, tensors_in_known
from manycard.pipeline.stages import move_to

__all__ = ["Call", "Measured", "Probe"]


@dataclass
class Call:
    """One call of a module in a forward pass."""

    name: str
    module: nn.Module
    again: bool
    """Whether the module, or one in which this one was called, had been called before."""
    began: int
    """The number of operations before it."""
    seconds: float = 0.0
    own_seconds: float = 0.0
    """What the calls inside don't account for."""
    calls: list[Call] = field(default_factory=list)

    def walk(self) -> Iterator[Call]:
        """This call and all inside it, in the order in which they began."""
        yield self
        for call in self.calls:
            yield from call.walk()


@dataclass(frozen=True)
class Measured:
    """What one call costs, forward and backward."""

    seconds: float
    activation_bytes: int
    """What forward keeps for backward."""
    input_bytes: int
    """What a checkpoint of the call keeps."""


class _Uses(TorchFunctionMode):
    """Counts operations and notes at which one each parameter and buffer is first used."""

    def __init__(self, device: torch.device, known: set[int]) -> None:
        super().__init__()
        self.operations = 0
        self.first: dict[int, int] = {}
        self._device, self._known = device, known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        refuse_differentiating(func)
        self.operations += 1
        away = False
        for tensor in tensors_in_known((args, kwargs)):
            if id(tensor) in self._known:
                self.first.setdefault(id(tensor), self.operations)
                away = away or tensor.device != self._device
        if away:
            args, kwargs = map_known(
                lambda tensor: tensor.to(self._device) if id(tensor) in self._known else tensor, (args, kwargs)
            )
        return func(*args, **kwargs)


class Probe:
    """Runs a model on one card to see what it is made of.

    Args:
        module: the model, anywhere.
        card: where it runs.
        run: runs the script's code with the model and a micro-batch that is on the card.
        streamed: bring parameters only while their module runs.
    """

    def __init__(self, module: nn.Module, card: Card, run: Callable[[], Any], *, streamed: bool) -> None:
        self.module, self.device, self._run = module, card.device, run
        self._streamed = streamed
        self._names = {id(part): name for name, part in module.named_modules()}
        self.first_use: dict[int, int] = {}
        """By id of a parameter or buffer, the number of operations before its first use."""

    def calls(self, times: int) -> Call | None:
        """The calls of a forward pass: the model's with all inside it, or a stand-in where parts are called alone.

        Args:
            times: passes to make; of each call, the fastest counts, since the first one sets libraries up.

        Returns:
            None if nothing of the model is called.
        """
        root = self._calls()
        for _ in range(times - 1):
            again = self._calls()
            pairs = list(zip(root.walk(), again.walk(), strict=False)) if root and again else []
            for one, other in pairs:
                if one.module is other.module:
                    one.seconds = min(one.seconds, other.seconds)
                    one.own_seconds = min(one.own_seconds, other.own_seconds)
        return root

    def _calls(self) -> Call | None:
        roots: list[Call] = []
        open_calls: list[Call] = []
        seen: set[int] = set()
        known = {id(tensor) for tensor in [*self.module.parameters(), *self.module.buffers()]}
        uses = _Uses(self.device, known)

        def before(module: nn.Module, args: Any) -> None:
            again = id(module) in seen or any(call.again for call in open_calls)
            seen.add(id(module))
            call = Call(self._names[id(module)], module, again, uses.operations, -self._clock())
            (open_calls[-1].calls if open_calls else roots).append(call)
            open_calls.append(call)

        def after(module: nn.Module, args: Any, result: Any) -> None:
            call = open_calls.pop()
            call.seconds += self._clock()
            call.own_seconds = max(0.0, call.seconds - sum(inner.seconds for inner in call.calls))

        with ExitStack() as stack:
            for part in self.module.modules():
                stack.callback(part.register_forward_pre_hook(before, prepend=True).remove)
                stack.callback(part.register_forward_hook(after).remove)
            stack.enter_context(self._kept())
            with uses:
                self._run()
        self.first_use = uses.first
        if len(roots) == 1:
            return roots[0]
        seconds = sum(call.seconds for call in roots)
        return Call("", self.module, False, 0, seconds, calls=roots) if roots else None

    def costs(self, calls: Sequence[Call], times: int) -> dict[int, Measured]:
        """The cost of each of these calls, by its place among them.

        Each is measured at the moment at which it comes in the forward pass, on the inputs that it has then.
        """
        waiting: dict[int, list[int]] = {}
        for place, call in enumerate(calls):
            waiting.setdefault(id(call.module), []).append(place)
        found: dict[int, Measured] = {}
        measuring = False

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal measuring
            if measuring or not waiting.get(id(module)):
                return
            measuring = True
            found[waiting[id(module)].pop(0)] = self._measure(module, args, kwargs, times)
            measuring = False

        with ExitStack() as stack:
            for part in {id(call.module): call.module for call in calls}.values():
                stack.callback(part.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.enter_context(self._kept())
            self._run()
        return found

    def rest(self, root: Call, times: int) -> float:
        """The time of the script's code after the model's call (its loss), forward."""
        ended = [0.0]

        def after(module: nn.Module, args: Any, result: Any) -> None:
            ended[0] = self._clock()

        best = float("inf")
        with ExitStack() as stack:
            stack.callback(root.module.register_forward_hook(after).remove)
            stack.enter_context(self._kept())
            for _ in range(times):
                self._run()
                best = min(best, self._clock() - ended[0])
        return best

    # ---- measuring -----------------------------------------------------------------------------------------

    def _measure(self, module: nn.Module, args: Any, kwargs: Any, times: int) -> Measured:
        gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
        for parameter, _ in gradients:
            parameter.grad = None
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        best, kept = float("inf"), 0
        with self._at_card(module):
            own = {tensor.untyped_storage().data_ptr() for tensor in [*module.parameters(), *module.buffers()]}
            for _ in range(times):
                given, named = map_known(_as_input, (args, kwargs))
                storages: dict[int, int] = {}

                def note(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
                    storage = tensor.untyped_storage()
                    if storage.data_ptr() not in own:
                        storages[storage.data_ptr()] = storage.nbytes()
                    return tensor

                began = self._clock()
                with torch.enable_grad():
                    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                        result = module(*given, **named)
                    roots = [each for each in tensors_in_known(result) if each.requires_grad]
                    if roots:
                        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
                best, kept = min(best, self._clock() - began), sum(storages.values())
                del result, roots
            for parameter, _ in gradients:
                parameter.grad = None
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        return Measured(best, kept, sum(tensor.nbytes for tensor in tensors_in_known((args, kwargs))))

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    # ---- where parameters are meanwhile --------------------------------------------------------------------

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Without gradients, and with buffers as they were at the end; parameters as `streamed` says."""
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        with ExitStack() as stack, torch.no_grad():
            if self.device.type == "cuda":
                stack.enter_context(torch.cuda.device(self.device))
            if "torch._dynamo" in sys.modules:
                # Compiled blocks would be compiled for what happens only here.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if self._streamed:
                self._stream(stack)
            else:
                for tensor in [*self.module.parameters(), *self.module.buffers()]:
                    move_to(tensor, self.device)
            yield
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)

    def _stream(self, stack: ExitStack) -> None:
        stack.enter_context(without_autocast_cache())  # which would keep a cast of each weight on the card
        moved: list[list[tuple[Tensor, Tensor]]] = []

        def bring(module: nn.Module, args: Any) -> None:
            moved.append(self._bring([*module.parameters(recurse=False), *module.buffers(recurse=False)]))

        def put_back(module: nn.Module, args: Any, result: Any) -> None:
            _put_back(moved.pop())

        for part in self.module.modules():
            stack.callback(part.register_forward_pre_hook(bring, prepend=True).remove)
            stack.callback(part.register_forward_hook(put_back).remove)

    def _bring(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Put tensors on the card; those that were elsewhere, with what they held there."""
        moved = []
        for tensor in tensors:
            before = tensor.data
            if move_to(tensor, self.device):
                moved.append((tensor, before))
        return moved

    @contextmanager
    def _at_card(self, module: nn.Module) -> Iterator[None]:
        """A whole module on the card inside."""
        moved = self._bring([*module.parameters(), *module.buffers()])
        try:
            yield
        finally:
            _put_back(moved)


def _put_back(moved: Sequence[tuple[Tensor, Tensor]]) -> None:
    for tensor, before in moved:
        if tensor.grad is not None:
            tensor.grad.data = tensor.grad.data.to(before.device)
        tensor.data = before


def _as_input(tensor: Tensor) -> Tensor:
    """A copy to begin a graph with, which may be written in place."""
    made = tensor.detach().clone()
    return made.requires_grad_().view_as(made) * 1 if made.is_floating_point() else made
