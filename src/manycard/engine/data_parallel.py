"""`DataParallel`: the drop-in for ``torch.nn.DataParallel``.

Same signature, same contract, any optimizer and any loop; the class derives from ``nn.DataParallel``, so that code
which asks for that type to find ``.module`` goes on working. What differs:

    * Replicas are kept from call to call, hold real parameters, and see every change the script makes.
    * 0-dim outputs come back as their mean weighted by samples (integers as the sum), not as a vector.
    * Reading, calling and setting attributes of the module works through the wrapper.
    * ``state_dict`` loads with and without the ``module.`` prefix.
    * Large outputs stay on the cards that made them, behind one tensor, until something needs them whole
      (`manycard.engine.spread_tensor`).
    * ``output_device`` may be ``"balanced"`` (the card with the most free memory after the first call) or
      ``"rotate"`` (another card each call).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from manycard.cards import Card, choose_cards
from manycard.engine.batches.batch import move, tensors_in
from manycard.engine.batches.layout import OnDimension
from manycard.engine.calls.spreader import Spreader
from manycard.engine.driving.threads import current_place
from manycard.engine.engine import Engine
from manycard.errors import CardsError, ModelError, SettingError
from manycard.hangs import PULSE

__all__ = ["DataParallel"]

_PREFIX = "module."


class DataParallel(nn.DataParallel[nn.Module]):
    """Run a module on several cards in one process.

    Args:
        module: the module; it is moved to the first card.
        device_ids: GPUs by torch's index, the primary first; all of them by default. Also cards from
            `choose_cards`, or what ``--cards`` takes, such as ``"cpu:2"`` for two simulated cards.
        output_device: where outputs are joined: a GPU of `device_ids`, ``"balanced"`` or ``"rotate"``, which needs a
            backward pass between two calls.
        dim: the dimension of inputs and outputs that counts samples.
        graphs: ``"auto"`` replays training calls as CUDA graphs where it can, ``"on"`` raises where it can't.
        outputs: which outputs stay on the cards that made them until something needs them whole: ``"auto"`` large ones
            (from 32 MiB), ``"spread"`` all, ``"gathered"`` none. A loss of a spread output is computed where that is.

    Raises:
        CardsError: a card isn't there.
        SettingError: `output_device` is none of the cards; `graphs` is ``"on"`` and there can be none; there is no
            such choice of `outputs`.
        GraphError: `graphs` is ``"on"``, and a call can't be graphed.
        ModelError: the module can't be copied to other cards (at the first call).

    Example:
        >>> model = DataParallel(nn.Linear(4, 2), device_ids="cpu:2")
        >>> model(torch.zeros(6, 4)).shape
        torch.Size([6, 2])
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: str | int | Sequence[int | torch.device | Card] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        *,
        graphs: str = "off",
        outputs: str = "auto",
    ) -> None:
        nn.Module.__init__(self)
        for name in ("scatter", "replicate", "parallel_apply", "gather"):
            if getattr(type(self), name) is not getattr(nn.DataParallel, name):
                raise ModelError(
                    f"{type(self).__name__} overrides {name}(), which manycard doesn't call",
                    fix="derive from nn.DataParallel itself, or do it in the module's forward",
                )
        self.cards = _cards(device_ids)
        self.dim = dim
        self._graphs = graphs
        self._outputs = outputs
        self.module = module.to(self.cards[0].device)
        self.device_ids = [card.device.index if card.device.type == "cuda" else card.position for card in self.cards]
        self.output_device = output_device  # type: ignore[assignment]
        self._output = _output_position(output_device, self.cards)
        self._output_rule = output_device if isinstance(output_device, str) else None
        self._calls = 0
        self._spreader: Spreader | None = Spreader(self.module, self.cards, graphs, outputs)

    @property
    def engine(self) -> Engine:
        """The engine that spreads the calls."""
        assert self._spreader is not None, "a copy inside a replica has no engine"
        return self._spreader.engine

    def use_cards(self, cards: Sequence[Card]) -> None:
        """Spread over other cards from now on; the first stays the primary, and replicas are made anew."""
        assert cards[0].device == self.cards[0].device, "the primary holds the module"
        if self._spreader is not None:
            self._spreader.engine.close()
        self.cards = tuple(cards)
        self.device_ids = [card.device.index if card.device.type == "cuda" else card.position for card in cards]
        self._output = min(self._output, len(cards) - 1)
        self._spreader = Spreader(self.module, self.cards, self._graphs, self._outputs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module on all cards with the batch cut between them; gives the joined output."""
        compiler = sys.modules.get("torch._dynamo")
        spread = self._spread if compiler is None else compiler.disable(self._spread)
        return spread(args, kwargs)

    def _spread(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._spreader is None or current_place() is not None:
            return self.module(*args, **kwargs)
        sizes = self._sizes((args, kwargs))
        if sum(map(bool, sizes)) < 2:
            args, kwargs = move((args, kwargs), self.cards[0].device)
            return move(self.module(*args, **kwargs), self.cards[self._output_card()].device)
        with self._spreader.engine.lock, PULSE.busy("call"):
            value = self._spreader.call(args, kwargs, sizes, OnDimension(self.dim), self._output_card())
            self._calls += 1
        return value

    def _sizes(self, batch: Any) -> list[int]:
        if next(tensors_in(batch), None) is None:
            return [1]
        return self.engine.cutter.sizes_of(OnDimension(self.dim).count(batch), len(self.cards))

    def _output_card(self) -> int:
        if self._output_rule == "rotate":
            return self._calls % len(self.cards)
        if self._output_rule == "balanced" and self._calls == 1 and not self.cards[0].simulated:
            free = [torch.cuda.mem_get_info(card.device)[0] for card in self.cards]
            self._output = free.index(max(free))
        return self._output

    # ---- the module, seen through the wrapper --------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        module = self.__dict__.get("_modules", {}).get("module")
        own = name in self.__dict__ or hasattr(type(self), name) or name in self.__dict__.get("_modules", {})
        if module is not None and not own and hasattr(module, name):
            setattr(module, name, value)
        else:
            super().__setattr__(name, value)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state with or without the ``module.`` prefix."""
        own = set(self.state_dict())
        prefixed = {_PREFIX + key: value for key, value in state_dict.items()}
        fits = len(own & set(prefixed)) > len(own & set(state_dict))
        return super().load_state_dict(prefixed if fits else state_dict, strict=strict, assign=assign)

    # ---- copies and pickles --------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_spreader"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._spreader = Spreader(
            self.module, self.cards, self.__dict__.get("_graphs", "off"), self.__dict__.get("_outputs", "auto")
        )


# A compiled script must not look into a call that spans threads. This is the mark that torch.compiler.disable leaves;
# calling that here would import the compiler, which takes seconds.
DataParallel.forward._torchdynamo_disable = True  # type: ignore[attr-defined]


def _cards(device_ids: str | int | Sequence[int | torch.device | Card] | None) -> tuple[Card, ...]:
    try:
        return _chosen(device_ids)
    except CardsError as error:
        problem = error.problem.partition(": ")[2]
        raise CardsError("device_ids", device_ids, problem, fix=error.fix) from error


def _chosen(device_ids: str | int | Sequence[int | torch.device | Card] | None) -> tuple[Card, ...]:
    if device_ids is None or isinstance(device_ids, str):
        return choose_cards(device_ids or "all").cards
    items = [device_ids] if isinstance(device_ids, int) else list(device_ids)
    if items and all(isinstance(item, Card) for item in items):
        return tuple(cast("list[Card]", items))
    indices = [item.index if isinstance(item, torch.device) else item for item in items]
    if not indices or not all(isinstance(index, int) for index in indices):
        raise CardsError("device_ids", device_ids, "it names no card by its index", fix="write device_ids=[0, 1]")
    return choose_cards(cast("list[int]", indices)).cards


def _output_position(output_device: int | str | torch.device | None, cards: Sequence[Card]) -> int:
    if output_device is None or output_device in ("balanced", "rotate"):
        return 0
    names = {card.device.index if not card.simulated else card.position: card.position for card in cards}
    index: Any = output_device
    if isinstance(output_device, str):
        name = re.fullmatch(r"(?:cuda|cpu):(\d+)", output_device)
        index = int(name[1]) if name else None
    elif isinstance(output_device, torch.device):
        index = output_device.index
    if index not in names:
        raise SettingError(
            "output_device",
            output_device,
            f"it is none of this model's cards ({', '.join(map(str, cards))})",
            fix='give one of them, "balanced" or "rotate"',
        )
    return names[index]
