"""Memory that grows from step to step, and who keeps it.

Behaviour:
    * Every `every` steps, the memory of all live tensors is added up, with what only their graphs keep; on GPUs it is
      what the allocator has given out. In between nothing runs. One look takes some tens of milliseconds.
    * Memory that has grown between each of the newest four looks, by `LEAST` a step or more, is a leak.
    * Blamed are tensors that were new at one look and are there at the next: the script's variable, attribute or
      list that holds them is looked for, with the line that adds to it. A single tensor whose graph grows
      (``total = total + loss``) is another case.
    * Each holder is said once.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from manycard.diagnosis.finding import Finding
from manycard.diagnosis.memory_use.lines import keeping_line
from manycard.diagnosis.memory_use.live import bytes_of, graph_bytes, live_tensors
from manycard.diagnosis.memory_use.names import NOBODY, Holder, name_of

__all__ = ["LEAST", "GrowthWatch"]

LEAST = 32 * 1024
"""Bytes a step below which growth is no leak: allocators and caches settle."""
_LOOKS = 4


@dataclass
class _Look:
    step: int
    total: int
    alive: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)
    graphs: dict[int, int] = field(default_factory=dict)
    """Memory that the graph of the largest-graphed tensors keeps, by identity."""


class GrowthWatch:
    """Looks for memory that grows.

    Args:
        then: called with each finding.
        every: steps between two looks.
    """

    def __init__(self, then: Callable[[Finding], None], every: int = 8) -> None:
        self._then = then
        self._every = every
        self._steps = 0
        self._looks: deque[_Look] = deque(maxlen=_LOOKS)
        self._said: set[str] = set()

    def stepped(self) -> None:
        """A step has ended."""
        self._steps += 1
        if self._steps % self._every == 0:
            self._looks.append(self._look())
            if finding := self._judge():
                self._then(finding)

    def _look(self) -> _Look:
        tensors = live_tensors()
        seen: set[tuple[str, int]] = set()
        total = bytes_of(tensors, seen)
        saved: set[int] = set()
        total += graph_bytes(tensors, seen, set(), saved)
        # A tensor that a graph has saved turns up among Python's once it was looked at.
        tensors = [tensor for tensor in tensors if id(tensor) not in saved] or tensors
        nodes: set[object] = set()
        counted: set[tuple[str, int]] = set()
        roots = sorted((t for t in tensors if t.grad_fn is not None), key=Tensor.numel, reverse=True)
        graphs = {id(tensor): graph_bytes([tensor], counted, nodes) for tensor in roots}
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            total = sum(torch.cuda.memory_allocated(card) for card in range(torch.cuda.device_count()))
        return _Look(self._steps, total, {id(t): weakref.ref(t) for t in tensors}, graphs)

    def _judge(self) -> Finding | None:
        looks = list(self._looks)
        if len(looks) < _LOOKS:
            return None
        growths = [(b.total - a.total) / (b.step - a.step) for a, b in pairwise(looks)]
        if min(growths) < LEAST or max(growths) > 8 * min(growths):
            return None
        each = sorted(growths)[len(growths) // 2]
        kept = self._kept(looks)
        holder, sample = self._holder(kept)
        if not holder and (largest := self._largest_graph(looks[-1])) is not None:
            sample, kept = largest, [largest]
            holder = name_of(largest, {id(kept)})
        if holder.words in self._said:
            self._looks.clear()
            return None
        self._said.add(holder.words)
        self._looks.clear()
        return _finding(each, looks[-1].step - looks[0].step, holder, sample, kept)

    def _kept(self, looks: Sequence[_Look]) -> list[Tensor]:
        """Tensors that were new at the look before the newest and are still there."""
        before, middle, now = looks[-3], looks[-2], looks[-1]
        new = (middle.alive[key] for key in middle.alive if key not in before.alive or before.alive[key]() is None)
        found = [tensor for reference in new if (tensor := reference()) is not None and id(tensor) in now.alive]
        return [tensor for tensor in found if not isinstance(tensor, torch.nn.Parameter)]

    def _holder(self, kept: list[Tensor]) -> tuple[Holder, Tensor | None]:
        """Who holds most of what is kept, and one of it."""
        ignored = {id(kept)}
        names: Counter[Holder] = Counter()
        samples: dict[Holder, Tensor] = {}
        for tensor in sorted(kept, key=_weight, reverse=True)[:12]:
            name = name_of(tensor, ignored)
            if name:
                names[name] += _weight(tensor)
                samples.setdefault(name, tensor)
        if not names:
            return NOBODY, kept[0] if kept else None
        name = names.most_common(1)[0][0]
        return name, samples[name]

    def _largest_graph(self, look: _Look) -> Tensor | None:
        if not look.graphs:
            return None
        reference = look.alive.get(max(look.graphs, key=lambda key: look.graphs[key]))
        return reference() if reference is not None else None


def _weight(tensor: Tensor) -> int:
    """How much it is likely to keep; what a graph keeps isn't known for each."""
    return 2**40 if tensor.grad_fn is not None else tensor.numel() * tensor.element_size()


def _finding(each: float, steps: int, holder: Holder, sample: Tensor | None, kept: Sequence[Tensor]) -> Finding:
    seen = f"{each / 2**20:.2f} MB a step over {steps} steps"
    if sample is not None:
        kept = [tensor for tensor in kept if tensor.shape == sample.shape]
        graph = sample.grad_fn is not None
        shape = " x ".join(map(str, sample.shape)) or "a single number"
        many = f"{len(kept)} more tensors of {shape}" if len(kept) > 1 else f"a tensor of {shape}"
        seen += f"; {many}" + (", with the graph of the step that made each" if graph and len(kept) > 1 else "")
        seen += ", with a graph that grows" if graph and len(kept) == 1 else ""
        if graph:
            fix = "keep numbers or tensors without a graph: append(loss.detach()), total += loss.item()"
        else:
            fix = "empty it, keep the newest few (collections.deque(maxlen=...)), or keep .cpu() copies"
    else:
        fix = "look at the snapshot in https://docs.pytorch.org/memory_viz, which shows where it was allocated"
    if line := keeping_line(holder.file, holder.name):
        seen += f"; kept at {line}"
    cause = f"memory grows: {holder.words} keeps tensors of every step" if holder else "memory grows from step to step"
    return Finding(cause, seen, fix, "warning")
