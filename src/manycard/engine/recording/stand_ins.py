"""Parameters that share another's memory and stand in for it while a module's forward pass is recorded.

A parameter has one autograd node that gathers its gradient, for as long as any graph holds it, and that runs on the
stream it was made on. The script's graphs hold those of its parameters. A backward pass recorded on another stream
would wait for a stream that isn't recorded, which a CUDA graph can't. A stand-in has a node of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

__all__ = ["StandIns"]


class StandIns:
    """Stand-ins for a module's parameters that require gradients.

    Args:
        module: the module; `inside` it has the stand-ins.
    """

    def __init__(self, module: nn.Module) -> None:
        self._own: dict[int, nn.Parameter] = {}
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    self._places.append((part, name, parameter))
                    if id(parameter) not in self._own:
                        self._own[id(parameter)] = own = nn.Parameter(parameter.detach())
                        own.__dict__.update(parameter.__dict__)

    def of(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """What stands in for these."""
        return [self._own[id(parameter)] for parameter in parameters]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Let the module compute with the stand-ins."""
        recurrent = {part for part, _, _ in self._places if isinstance(part, nn.RNNBase)}
        before = [(part, part._flat_weights, part._flat_weight_refs) for part in recurrent]
        try:
            for part, name, parameter in self._places:
                part._parameters[name] = self._own[id(parameter)]
            for rnn, weights, _ in before:
                own = [None if weight is None else self._own.get(id(weight), weight) for weight in weights]
                # Or else it would find other weights than it knows, and move them to other memory.
                references = [None if weight is None else weakref.ref(weight) for weight in own]
                rnn.__dict__.update(_flat_weights=own, _flat_weight_refs=references)
            yield
        finally:
            for part, name, parameter in self._places:
                part._parameters[name] = parameter
            for rnn, weights, references in before:
                rnn.__dict__.update(_flat_weights=weights, _flat_weight_refs=references)
