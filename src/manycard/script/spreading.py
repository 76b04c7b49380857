"""Spreading an unmodified script's training over the cards of the machine.

The script runs once, in this process. Every outermost call of a module that it trains is cut over the cards and
joined, on the drop-in's engine; the script sees whole batches and whole outputs everywhere else.

Behaviour:
    * The first call of a module, and of every new kind of call (other structure, dtypes, mode), is compared with one
      card (`manycard.script.comparison.check`); what can't be cut stays on one card, said once, with the reason.
    * Later calls are compared again, after 2, 4, 8, ... of them, and where a call may show what none before did
      (`manycard.script.kinds`): what a batch holds (padding, lengths) may decide whether cutting changes the result. A
      module found different from then on stays on one card; so does one whose cards return different plain values.
    * Calls with fewer than two samples run on one card, and so do those that leave a card's BatchNorm one sample.
    * A script that uses manycard itself is left alone from then on.
"""

from __future__ import annotations

import itertools
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from manycard.cards.card import Card
from manycard.engine.batches.batch import map_tensors, tensors_in
from manycard.engine.batches.sizes import shard_sizes
from manycard.engine.calls.spreader import Spreader
from manycard.engine.driving.spans import span
from manycard.engine.replicas.sync_batchnorm import convert_batchnorm
from manycard.engine.spread_tensor import plain
from manycard.errors import BatchError
from manycard.script.comparison.check import Verdict, batchnorm_in_training, find_layout
from manycard.script.comparison.layout import OtherOutputsError
from manycard.script.comparison.words import counted, ordinal
from manycard.script.kinds import Kind, holds_nothing, hook_in, signature, tensors_of
from manycard.script.means import SpreadsCalls
from manycard.script.module_report import ModuleReport
from manycard.script.output import printing_once

__all__ = ["ModuleReport", "ScriptSpreading", "SpreadModule", "SpreadSettings"]

_HELD = "_manycard_spread"
"""The attribute of a module that holds what spreads it."""
_SWITCHES = {_HELD, "training", "structure"}
"""What changes that needs no new comparison: the mode is part of a call's kind, new replicas equal the module."""
_HALF = (torch.bfloat16, torch.float16)
_MOST_KINDS = 16
"""Kinds of calls of one module that are looked at before the rest runs on one card."""


@dataclass(frozen=True)
class SpreadSettings:
    """How an unmodified script is spread."""

    choose: Callable[[], Sequence[Card]]
    """Gives the cards, the primary first; called when the first trained module is."""
    sync_batchnorm: bool = False
    """BatchNorm statistics over the whole batch; a small exchange a layer, forward and backward."""
    autocast: Callable[[torch.device], AbstractContextManager[object]] | None = None
    """The context of each outermost call; outputs in half precision come back as fp32."""
    compile: bool = False
    """Compile each card's module."""
    channels_last: bool = False
    """Keep convolutions' weights and 4-dimensional inputs in channels-last memory format."""
    graphs: str = "off"
    """Whether calls are replayed as CUDA graphs: ``"off"``, ``"auto"`` (where they can be) or ``"on"``."""
    outputs: str = "auto"
    """Which outputs stay on the cards that made them: ``"auto"`` large ones, ``"spread"`` all, ``"gathered"`` none."""


class ScriptSpreading:
    """Handles a script's outermost calls (a `manycard.script.calls.Handler`).

    Args:
        settings: the cards, and how.
    """

    def __init__(self, settings: SpreadSettings) -> None:
        self.settings = settings
        self.cards: tuple[Card, ...] = ()
        """The cards, once a trained module has been called."""
        self._spread: weakref.WeakSet[SpreadModule] = weakref.WeakSet()
        self.reports: list[ModuleReport] = []

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plain: Callable[..., Any]
    ) -> Any:
        if isinstance(module, nn.DataParallel):
            inner = module.module
            return self(inner, args, kwargs, inner)
        if isinstance(module, DistributedDataParallel):
            return plain(*args, **kwargs)  # a rank of the script's own making
        # Held by the module itself, so that both go together: replicas hold the module they are copies of.
        spread = module.__dict__.get(_HELD)
        if not isinstance(spread, SpreadModule) or spread.module is not module or spread not in self._spread:
            self.cards = self.cards or tuple(self.settings.choose())
            report = ModuleReport(type(module).__name__)
            self.reports.append(report)
            spread = module.__dict__[_HELD] = self._spread_module(module, report)
            self._spread.add(spread)
        value: Any = spread.call(args, kwargs, plain)
        return value

    def close(self) -> None:
        """Let go of the modules, of their replicas and of the threads that drive those."""
        for spread in list(self._spread):
            spread.close()
        self._spread.clear()

    def _spread_module(self, module: nn.Module, report: ModuleReport) -> SpreadModule:
        return SpreadModule(module, self.cards, self.settings, report)

    def describe(self) -> str:
        """One line: what was spread, over which cards, and how fast."""
        parts = [text for text in map(self._describe_module, self.reports) if text]
        if len(self.cards) == 1:
            return f"ran on one card, {self._names()}, which is all there is"
        if not parts:
            return "nothing was spread: no module with parameters that require gradients was called"
        return f"cards {self._names()}: {'; '.join(parts)}"

    def _names(self) -> str:
        return ", ".join(map(str, self.cards))

    def _describe_module(self, report: ModuleReport) -> str:
        if not report.spread:
            return f"{report.name} ran on one card ({counted(report.whole)})" if report.whole else ""
        calls = report.spread + report.whole
        text = f"{report.name} was spread in {report.spread} of {counted(calls)}"
        if report.seconds > 0:
            rate = report.samples / report.seconds / len(self.cards)
            text += f", {rate:,.0f} samples/s a card"
        if report.comparisons:
            text += f" ({counted(report.comparisons, 'comparison')} with one card took {report.comparing:.1f} s)"
        return text


class SpreadModule:
    """One module of the script's."""

    def __init__(
        self, module: nn.Module, cards: tuple[Card, ...], settings: SpreadSettings, report: ModuleReport
    ) -> None:
        self._module = weakref.ref(module)
        self._given = cards
        self._settings = settings
        self._report = report
        self._cards: tuple[Card, ...] | None = None
        self._spreader: SpreadsCalls | None = None
        self._kinds: dict[Any, Kind] = {}
        self._started = 0.0
        self._fewest = 2
        """Samples below which a call is not spread."""

    @property
    def module(self) -> nn.Module:
        """The script's module."""
        module = self._module()
        assert module is not None, "a call holds its module"
        return module

    def close(self) -> None:
        """Take this out of the module, and end its threads."""
        module = self._module()
        if module is not None and module.__dict__.get(_HELD) is self:
            del module.__dict__[_HELD]
        if self._spreader is not None:
            self._spreader.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the module is another module."""

    def __reduce__(self) -> tuple[Any, ...]:
        """A module that is saved whole is saved without: with an empty dictionary, which weights_only allows."""
        return OrderedDict, ()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], plain: Callable[..., Any]) -> Any:
        """Give the result of one outermost call."""
        if holds_nothing(args, kwargs):
            return plain(*args, **kwargs)
        if len(self._given) == 1:
            if not self._report.whole:
                self._begin_on_one_card(args, kwargs)
            return self._on_one_card(args, kwargs, plain)
        kind = self._kind(args, kwargs)
        samples = kind.samples((args, kwargs)) if kind is not None else 0
        if kind is None or samples < self._fewest or self._starves_batchnorm(samples, args, kwargs):
            return self._on_one_card(args, kwargs, plain)
        spreader = self._spreader = self._spreader or self._make_spreader()
        with spreader.lock:
            if not self._still_right(kind, spreader.prepare(args, kwargs), args, kwargs):
                return self._on_one_card(args, kwargs, plain)
            try:
                with printing_once():
                    value = self._around(self._spread(spreader, kind, samples), args, kwargs)
            except OtherOutputsError as error:
                self._keep_whole(kind, str(error).partition(" Fix: ")[0].rstrip("."), args, kwargs)
                return self._on_one_card(args, kwargs, plain)
        kind.calls += 1
        self._report.spread += 1
        self._report.samples += samples
        self._report.seconds = time.perf_counter() - self._started
        return value

    def _begin_on_one_card(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the first call where there is one card in all."""
        reason = self._place()
        if reason:
            self._say_whole(reason, args, kwargs)
            self._prepare()
        if self._settings.graphs != "off":
            _say(f"{self._report.name} runs without CUDA graphs: on one card its calls are the script's own")

    def _on_one_card(self, args: tuple[Any, ...], kwargs: dict[str, Any], plain: Callable[..., Any]) -> Any:
        self._report.whole += 1
        with span("forward", str((self._cards or self._given)[0])):
            return self._around(plain, args, kwargs)

    def _starves_batchnorm(self, samples: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a card would hold one sample, from which BatchNorm1d refuses to take statistics."""
        if samples >= 2 * len(self._given) or not batchnorm_in_training(self.module):
            return False
        why = "a card would hold one sample, too few for BatchNorm's statistics (--sync-batchnorm takes them from all)"
        self._say_whole(why, args, kwargs)
        return True

    def _spread(self, spreader: SpreadsCalls, kind: Kind, samples: int) -> Callable[..., Any]:
        layout = kind.verdict.layout
        assert layout is not None, "a kind with samples has a layout"
        sizes = shard_sizes(samples, spreader.parts)
        return lambda *args, **kwargs: spreader.run(args, kwargs, sizes, layout.bound((args, kwargs), sizes))

    def _around(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call in the settings' precision and memory format."""
        if self._settings.channels_last:
            args, kwargs = map_tensors(_channels_last, (args, kwargs))
        if self._settings.autocast is None:
            return call(*args, **kwargs)
        device = self._given[0].device
        with self._settings.autocast(device):
            value = call(*args, **kwargs)
        return map_tensors(lambda tensor: tensor.float() if tensor.dtype in _HALF else tensor, value)

    # ---- which calls can be spread -------------------------------------------------------------------------

    def _kind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind | None:
        """What is known of calls like this one; None where they are left alone."""
        try:
            key = (self.module.training, torch.is_grad_enabled(), signature((args, kwargs)))
        except BatchError as error:
            self._say_whole(str(error).rstrip("."), args, kwargs)
            return None
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= _MOST_KINDS:
                self._say_whole(f"it is called in more than {_MOST_KINDS} different ways", args, kwargs)
                return None
            kind = self._look(args, kwargs)
            if kind is not None:
                self._kinds[key] = kind
        return kind

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind | None:
        if not any(tensor.dim() and max(tensor.shape) > 1 for tensor in tensors_in((args, kwargs))):
            return None  # nothing to cut in this call; another one may have more samples
        reason = self._place()
        if not reason:
            reason = hook_in(self.module)
        verdict = Verdict(None, reason) if reason else self._compare(args, kwargs)
        if verdict.layout is None:
            self._say_whole(verdict.reason, args, kwargs)
        elif torch.is_grad_enabled():
            self._say_differs(verdict)
        return Kind(verdict)

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any], known: Any = None) -> Verdict:
        assert self._cards is not None, "placed before"
        # A compiled module computes what the module inside does, which needs no compilation to compare.
        module = getattr(self.module, "_orig_mod", self.module)
        args, kwargs = map_tensors(plain, (args, kwargs))
        with span("comparison"):
            return find_layout(module, self._cards, args, kwargs, known)

    def _compare(self, args: tuple[Any, ...], kwargs: dict[str, Any], known: Any = None) -> Verdict:
        """`_find`, timed."""
        started = self._now()
        verdict = self._find(args, kwargs, known)
        seconds = self._now() - started
        self._report.comparisons += 1
        self._report.comparing += seconds
        self._started += seconds
        return verdict

    def _now(self) -> float:
        """The time when the cards have done what was asked of them so far."""
        for card in self._cards or ():
            if not card.simulated:
                torch.cuda.synchronize(card.device)
        return time.perf_counter()

    def _place(self) -> str:
        """Choose the order of the cards by where the module is; gives why it can't be spread, or nothing."""
        if self._cards is not None:
            return ""
        devices = {parameter.device for parameter in self.module.parameters()}
        if len(devices) > 1:
            return f"its parameters are on {len(devices)} devices"
        device = devices.pop()
        own = [card for card in self._given if card.device == device]
        if not own:
            return f"it is on {device}, which is none of the cards ({', '.join(map(str, self._given))})"
        first = own[0]
        self._cards = (first, *(card for card in self._given if card is not first))
        self._prepare()
        return ""

    def _prepare(self) -> None:
        if self._settings.sync_batchnorm and len(self._given) > 1:
            convert_batchnorm(self.module)
        if self._settings.channels_last:
            self.module.to(memory_format=torch.channels_last)
        if self._settings.compile:
            self.module.compile()

    def _make_spreader(self) -> SpreadsCalls:
        assert self._cards is not None, "placed before"
        self._started = time.perf_counter()
        spreader = Spreader(self.module, self._cards, self._settings.graphs, self._settings.outputs)
        if self._settings.graphs != "off" and spreader.graphs is None:
            _say(f"{self._report.name} runs without CUDA graphs: simulated cards have none")
        return spreader

    def _still_right(self, kind: Kind, changed: set[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Compare again where it is due; a difference ends the kind's spreading."""
        if not kind.due(changed - _SWITCHES) and not kind.tells_more((args, kwargs), len(self._given)):
            return True
        verdict = self._compare(args, kwargs, kind.verdict.layout)
        if verdict.layout is not None:
            kind.found(verdict)
            return True
        self._keep_whole(kind, verdict.reason, args, kwargs)
        return False

    def _keep_whole(self, kind: Kind, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let calls like this one run on one card from now on."""
        kind.verdict = Verdict(None, reason)
        self._say_whole(f"from the {ordinal(kind.calls + 1)} call like it on, {reason}", args, kwargs)

    # ---- what the user is told -----------------------------------------------------------------------------

    def _say_whole(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if reason not in self._report.reasons:
            self._report.reasons.append(reason)
            shapes = " ".join(str(tuple(tensor.shape)) for tensor in itertools.islice(tensors_of(args, kwargs), 4))
            when = f" when called with {shapes}" if shapes else ""
            _say(f"{self._report.name} runs on one card{when}: {reason}")

    def _say_differs(self, verdict: Verdict) -> None:
        found = []
        if verdict.draws:
            found.append("it draws at random in forward (dropout, noise), and each card draws its own")
        if batchnorm_in_training(self.module):
            found.append("BatchNorm takes its statistics from each card's part (--sync-batchnorm takes them from all)")
        for why in found:
            if why not in self._report.differs:
                self._report.differs.append(why)
                _say(f"{self._report.name} will not give one card's numbers: {why}")


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _say(text: str) -> None:
    print(f"manycard: {text}", file=sys.stderr)
