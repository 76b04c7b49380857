"""Random draws made repeatable, so that a module can be compared with itself on parts of a batch.

Noise drawn in ``forward`` differs between one card and several, as dropout does. While `PinnedDraws` is active a random
operation gives what one fixed pattern holds, and a card's part of the batch gets *its samples' part* of that pattern:
sample 5 draws the same on one card and on the card that has it. What then differs depends on other samples.

    * Fractions come from the open interval from 0 to 1, whatever they are drawn from; whole numbers and choices
      (``multinomial``) from the range or the weights that were given.
    * A Bernoulli draw gives 1: nothing is dropped.
    * A permutation is one cycle of all its places, the same for each length. Over the samples of a batch no part of
      such a cycle is a permutation of that part, so that a module which permutes samples is found to differ.

Which dimension of a draw counts samples is not known, only its size: `Way` says what to take it for.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from manycard.engine.driving.threads import current_place

__all__ = ["PATTERNS", "HostDraws", "PinnedDraws", "Way"]

_SEEDS = (0, 11, 17)
"""Of the patterns. Two samples, too, are alike in one of them and far apart in another, in either order."""
_DRAWS = {
    *("rand", "rand_like", "uniform", "randn", "randn_like", "normal", "normal_functional", "log_normal", "cauchy"),
    *("exponential", "geometric", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "bernoulli"),
    *("randint", "randint_like", "random", "randperm", "multinomial"),
}
"""Operations whose results are draws and nothing else."""
PATTERNS = len(_SEEDS)
"""How many patterns there are. In one, few samples may by chance have nothing to do with one another."""
_WIDEST = 1 << 24
"""Whole numbers drawn without a range are below this, which every dtype of numbers that counts can hold."""


class Way(Enum):
    """What a draw stands for, by the number of its rows; the likeliest first."""

    ROWS = "a draw with as many rows as there are samples is theirs, any other is the same for all"
    SAMPLES = "a draw with a multiple of them is theirs too: the rows of each sample together"
    TIME_FIRST = "the same, as rows of (time, sample), time first"
    SHARED = "each draw is the same for all samples, however many rows it has"


@dataclass(frozen=True)
class _Part:
    """The samples of one card, of `total`."""

    start: int
    size: int
    total: int


class PinnedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives a fixed pattern for random draws.

    Args:
        pattern: which of the `PATTERNS`.

    Attributes:
        drawn: whether anything was drawn while it was active.
        patterned: whether what it gave came from the pattern.
        permuted: whether it gave a permutation.
        way: how the draws of parts are taken from the pattern.
        prefer: the dimension that counts samples, where sizes leave it open.
    """

    def __init__(self, pattern: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = _SEEDS[pattern]
        self.drawn = False
        self.patterned = False
        self.permuted = False
        self.way = Way.ROWS
        self.prefer = 0
        self._here = threading.local()
        self._parts: dict[int, _Part] = {}
        self._on: dict[torch.device, _Part] = {}

    def begin_part(self, start: int, size: int, total: int, position: int = 0) -> None:
        """What is drawn from now on is for these samples: in the job of the card at `position`, or in this thread."""
        self._here.part = self._parts[position] = _Part(start, size, total)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        given = {argument.name: argument.default_value for argument in func._schema.arguments}
        given |= dict(zip(given, args, strict=False)) | kwargs
        if "dropout_p" in given:  # attention that draws its dropout inside one kernel
            self.drawn = self.drawn or bool(given["dropout_p"])
            at = list(given).index("dropout_p")
            if at < len(args):
                return func(*args[:at], 0.0, *args[at + 1 :], **kwargs)
            return func(*args, **{**kwargs, "dropout_p": 0.0})
        if "dropout" in given:  # recurrent layers, which trials put in order
            self.drawn = self.drawn or bool(given["dropout"])
            return func(*args, **kwargs)
        with self:  # in inference mode, operations that are made of others arrive whole
            made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
        self.drawn = True
        if name in ("native_dropout", "_fused_dropout"):
            return given["self" if "self" in given else "input"].clone(), _kept(given)
        if name.startswith("rrelu_with_noise"):
            given["noise"].copy_(torch.where(given["self"] > 0, 1.0, (given["lower"] + given["upper"]) / 2))
            return given["self"].mul_(given["noise"]) if name.endswith("_") else given["self"] * given["noise"]
        result = func(*args, **kwargs)
        if name.removesuffix("_") in _DRAWS and isinstance(result, Tensor):
            self._pin(name, result, given)
        return result

    def _pin(self, name: str, result: Tensor, given: dict[str, Any]) -> None:
        if name.startswith("bernoulli"):
            result.fill_(1)
        elif name == "randperm":
            self.patterned = self.permuted = True
            result.copy_(_cycle(len(result), self._seed))
        elif name == "multinomial":
            result.copy_(self._choices(given["self"].detach(), result, given["replacement"]))
        elif name in ("randint", "randint_like", "random", "random_"):
            low = given.get("low", given.get("from")) or 0
            high = given.get("high", given.get("to")) or low + _widest(result.dtype)
            result.copy_((low + self._fractions(result.shape, result.device) * (high - low)).floor())
        elif result.is_floating_point() or result.is_complex():
            result.copy_(self._fractions(result.shape, result.device))
        else:  # counts
            result.fill_(1)

    def _choices(self, weights: Tensor, result: Tensor, replacement: bool) -> Tensor:
        """Choices among the last dimension, by their weights: the largest of log(weight) + Gumbel noise."""
        weights = weights.double()
        if not replacement:
            noise = self._fractions(weights.shape, weights.device)
            return (weights.log() - (-noise.log()).log()).topk(result.shape[-1]).indices
        noise = self._fractions((*result.shape, weights.shape[-1]), weights.device)
        return (weights.unsqueeze(-2).log() - (-noise.log()).log()).argmax(-1)

    def _fractions(self, shape: Any, device: torch.device) -> Tensor:
        """Of the open interval from 0 to 1, fp64; for a part, its samples' of those that all samples have."""
        self.patterned = True
        part = self._part(device)
        dim = None if part is None or self.way is Way.SHARED else self._dim(shape, part.size)
        if part is None or dim is None:
            return self._pattern(shape, device)
        each = shape[dim] // part.size
        before, after = tuple(shape[:dim]), tuple(shape[dim + 1 :])
        time_first = self.way is Way.TIME_FIRST
        rows = (each, part.total) if time_first else (part.total, each)
        whole = self._pattern((*before, part.total * each, *after), device).reshape(*before, *rows, *after)
        own: Tensor = whole.narrow(dim + 1 if time_first else dim, part.start, part.size)
        return own.flatten(dim, dim + 1)

    def _pattern(self, shape: Any, device: torch.device) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed)
        drawn = torch.rand(tuple(shape), generator=generator, dtype=torch.float64, device="cpu")
        return drawn.clamp_min_(1e-12).to(device)

    def _part(self, device: torch.device) -> _Part | None:
        place = current_place()
        part: _Part | None = getattr(self._here, "part", None) if place is None else self._parts.get(place.position)
        if part is None:
            return self._on.get(device)  # a checkpoint runs forward again, in a thread of autograd's for its card
        if device.type != "cpu":
            self._on[device] = part
        return part

    def _dim(self, shape: Any, size: int) -> int | None:
        """Which dimension counts samples; None where none can."""
        order = sorted(range(len(shape)), key=lambda dim: dim != self.prefer)
        exact = [dim for dim in order if shape[dim] == size]
        multiples = [dim for dim in order if shape[dim] and shape[dim] % size == 0]
        return next(iter(exact if self.way is Way.ROWS else multiples), None)


def _kept(given: dict[str, Any]) -> Tensor:
    """The mask of a fused dropout that drops nothing."""
    if "input" in given:
        return torch.ones_like(given["input"], dtype=torch.bool)
    return torch.ones_like(given["self"], dtype=torch.uint8)


def _cycle(length: int, seed: int) -> Tensor:
    """A permutation that is one cycle of all places."""
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed), device="cpu")
    following = torch.empty_like(order)
    following[order] = order.roll(-1)
    return following


def _widest(dtype: torch.dtype) -> int:
    if dtype is torch.bool:
        return 2
    return _WIDEST if dtype.is_floating_point else min(_WIDEST, torch.iinfo(dtype).max)


class HostDraws:
    """Lets every replica's forward pass see the same draws from ``random`` and NumPy.

    `pin` is a forward pre-hook and `look` a forward hook of the module that is compared; copies of the module on
    other cards call the same object.

    Args:
        pattern: as for `PinnedDraws`.

    Attributes:
        drawn: whether a forward pass drew.
    """

    def __init__(self, pattern: int = 0) -> None:
        self._seed = _SEEDS[pattern]
        self.drawn = False
        self._state: Any = None

    def pin(self, *call: Any) -> None:
        """Start from the same state in every forward pass."""
        random.seed(self._seed)
        np.random.seed(self._seed)
        self._state = self._states()

    def look(self, *call: Any) -> None:
        """Note whether anything was drawn since."""
        self.drawn = self.drawn or self._states() != self._state

    def __deepcopy__(self, memo: dict[int, Any]) -> HostDraws:
        return self

    @staticmethod
    def _states() -> tuple[Any, int, bytes]:
        numpy = np.random.get_state(legacy=False)["state"]
        return random.getstate(), numpy["pos"], numpy["key"].tobytes()
