"""Random draws replaced by constants, so that a module can be compared with itself on parts of a batch.

Noise drawn in ``forward`` differs between one card and several, as dropout does. While `PinnedDraws` is active every
random operation gives the same constant in every row: 1 from a Bernoulli draw (nothing is dropped), one half from
the others. Draws of integers (permutations, samples of indices) can't be replaced so and stay random.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["HostDraws", "PinnedDraws"]


class PinnedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives constants for random draws.

    Attributes:
        drawn: whether anything was drawn while it was active.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        if "dropout_p" in names:
            # Attention that draws its dropout inside one kernel.
            given = dict(zip(names, args, strict=False)) | kwargs
            self.drawn = self.drawn or bool(given.get("dropout_p"))
            at = names.index("dropout_p")
            if at < len(args):
                return func(*args[:at], 0.0, *args[at + 1 :], **kwargs)
            return func(*args, **{**kwargs, "dropout_p": 0.0})
        self.drawn = True
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and (result.is_floating_point() or result.is_complex()):
            result.fill_(1.0 if "bernoulli" in func._schema.name else 0.5)
        return result


class HostDraws:
    """Lets every replica's forward pass see the same draws from ``random`` and NumPy.

    `pin` is a forward pre-hook and `look` a forward hook of the module that is compared; copies of the module on
    other cards call the same object.

    Attributes:
        drawn: whether a forward pass drew.
    """

    def __init__(self) -> None:
        self.drawn = False
        self._state: Any = None

    def pin(self, *call: Any) -> None:
        """Start from the same state in every forward pass."""
        random.seed(0)
        np.random.seed(0)
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
