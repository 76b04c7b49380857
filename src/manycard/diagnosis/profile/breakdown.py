"""Where the time of a step goes, for each card: parts that add up to the step. Pure.

The time of the steps is cut at the ends of steps. For a GPU it is what the card did: of several things at once, the
first of this list counts; what the card did nothing in is laid to what the host did meanwhile.

    forward, backward, update   kernels, by what the host was in when it launched them
    reduce                      NCCL's kernels and copies between cards, as far as nothing of the above ran beside them
    copy                        copies from the host, as far as they are alone
    input                       nothing ran, and the script waited for its loader
    host                        nothing ran: the host had not launched anything yet
    idle                        nothing ran, and the host waited for another card or rank

For a simulated card it is what its thread did; ``host`` is then the script's own code, and ``idle`` the other cards'
turns.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from manycard.diagnosis.profile.intervals import Interval, clip, intersection, length, minus, union
from manycard.diagnosis.profile.trace import Kernel, Trace

__all__ = ["PARTS", "CardTime", "break_down"]

PARTS = ("input", "copy", "forward", "backward", "reduce", "update", "host", "idle")
"""The parts of a step, in the order in which they are shown."""


@dataclass(frozen=True)
class CardTime:
    """A card's part of a step, in milliseconds, on average over the steps that were recorded."""

    card: str
    step: float
    input: float = 0.0
    copy: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    reduce: float = 0.0
    """Not hidden behind computing."""
    update: float = 0.0
    host: float = 0.0
    own: float = 0.0
    """Of `host`, what the script spent outside of steps; in no other part."""
    idle: float = 0.0
    reduce_hidden: float = 0.0
    """Of reducing, what ran beside computing; in no other part."""
    kernels: float = 0.0
    """Kernels a step; 0 for simulated cards."""
    waits: float = 0.0
    """How often a step the host waited for a card, in CUDA calls."""
    waiting: float = 0.0
    """How long it did, in milliseconds."""
    simulated: bool = True

    @property
    def computing(self) -> float:
        """Forward, backward and update."""
        return self.forward + self.backward + self.update

    def as_dict(self) -> dict[str, Any]:
        """For JSON; times in milliseconds."""
        return {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(self).items()}

    @classmethod
    def of(cls, read: dict[str, Any]) -> CardTime:
        """From what `as_dict` gave."""
        known = {each.name for each in fields(cls)}
        return cls(**{key: value for key, value in read.items() if key in known})


def break_down(trace: Trace, cards: Sequence[str]) -> list[CardTime]:
    """Each card's part of the steps in `trace`.

    Args:
        trace: between its first and its last beat lie the steps.
        cards: those of this process, as they are named.

    Returns:
        One a card; none where the trace holds no whole step.
    """
    beats = trace.beats
    if len(beats) < 2:
        return []
    begin, end, count = beats[0], beats[-1], len(beats) - 1
    by_host = _by_host(trace, begin, end)
    # Comparisons with one card, which become rare, are left out.
    window = minus([(begin, end)], by_host("comparison"))
    if any(kernel.kind == "compute" for kernel in trace.kernels):
        parts = [_of_gpu(trace, card, window, by_host) for card in cards]
    else:
        parts = [_of_simulated(trace, card, cards, window, by_host) for card in cards]
    scale = 1e3 * count
    of_ours = [span for span in trace.spans if span.what == "drain"]
    waits = [
        span
        for span in trace.waits
        if begin <= span.start < end and not any(own.start <= span.start < own.end for own in of_ours)
    ]
    return [
        CardTime(
            card=card,
            step=length(window) / scale,
            **{name: value / scale for name, value in found.items() if name != "kernels"},
            kernels=found.get("kernels", 0.0) / count,
            waits=len(waits) / count,
            waiting=sum(span.end - span.start for span in waits) / scale,
            simulated="kernels" not in found,
        )
        for card, found in zip(cards, parts, strict=True)
    ]


def _by_host(trace: Trace, begin: float, end: float) -> Callable[..., list[Interval]]:
    """``(what, card)`` -> when the host was in such a span; of any card, where none is given."""

    def found(*what: str, card: str | None = None) -> list[Interval]:
        spans = (s for s in trace.spans if s.what in what and (card is None or s.card in (card, "")))
        return clip(union((s.start, s.end) for s in spans), begin, end)

    return found


# ---- simulated cards ---------------------------------------------------------------------------------------


def _of_simulated(
    trace: Trace, card: str, cards: Sequence[str], window: list[Interval], host: Callable[..., list[Interval]]
) -> dict[str, float]:
    """What a card's thread did; a job that names no part of its own is what its caller was in."""
    own: dict[str, list[Interval]] = {what: host(what, card=card) for what in ("forward", "backward", "update")}
    jobs = host("job", card=card)
    if jobs:
        own = {what: intersection(times, jobs) for what, times in own.items()}
    if len(cards) == 1:
        elsewhere = union((s.start, s.end) for s in trace.backwards)
        own["backward"] = union([*own["backward"], *elsewhere])
    reduces = union([*host("reduce"), *_collectives(trace, window)])
    order = [
        ("input", host("loader")),
        ("reduce", reduces),
        ("copy", host("copy", card=card)),
        ("update", own["update"]),
        ("backward", own["backward"]),
        ("forward", own["forward"]),
        ("idle", host("job")),
    ]
    parts, left = _deal_out(order, window)
    hidden = intersection(intersection(reduces, union([*own["backward"], *own["forward"]])), window)
    if len(cards) == 1 and hidden:  # a rank whose collectives run beside its backward pass
        parts["reduce"] -= length(hidden)
        parts["backward"] += length(intersection(hidden, own["backward"]))
        parts["forward"] += length(minus(hidden, own["backward"]))
    outside = minus(left, host("step", "call"))
    return {**parts, "host": length(left), "own": length(outside), "reduce_hidden": length(hidden)}


def _collectives(trace: Trace, window: list[Interval]) -> list[Interval]:
    return intersection(union((span.start, span.end) for span in trace.collectives), window)


def _deal_out(
    order: Iterable[tuple[str, list[Interval]]], window: list[Interval]
) -> tuple[dict[str, float], list[Interval]]:
    """How long each part is, where the first that covers a moment has it; and what none covers."""
    left, parts = window, {}
    for name, times in order:
        parts[name] = length(intersection(left, times))
        left = minus(left, times)
    return parts, left


# ---- GPUs --------------------------------------------------------------------------------------------------


def _of_gpu(trace: Trace, card: str, window: list[Interval], host: Callable[..., list[Interval]]) -> dict[str, float]:
    begin, end = window[0][0], window[-1][1]
    kernels = [k for k in trace.kernels if k.card == card and k.end > begin and k.start < end]
    part_of = _parts_by_launch(trace)
    times: dict[str, list[Interval]] = {}
    for kernel in kernels:
        times.setdefault(_part(kernel, part_of), []).append((kernel.start, kernel.end))
    merged = {part: clip(union(found), begin, end) for part, found in times.items()}
    computing = union(time for part in ("update", "backward", "forward") for time in merged.get(part, []))
    busy = union(time for found in merged.values() for time in found)
    order = [
        *((part, merged.get(part, [])) for part in ("update", "backward", "forward", "reduce", "copy")),
        ("input", host("loader")),
        ("idle", minus(_waits_of(trace), busy) if len({k.card for k in trace.kernels}) > 1 else []),
    ]
    parts, left = _deal_out(order, window)
    return {
        **parts,
        "host": length(left),
        "own": length(minus(left, host("step", "call"))),
        "reduce_hidden": length(intersection(intersection(merged.get("reduce", []), computing), window)),
        "kernels": float(sum(kernel.kind == "compute" for kernel in kernels)),
    }


def _waits_of(trace: Trace) -> list[Interval]:
    return union((span.start, span.end) for span in trace.waits)


def _part(kernel: Kernel, part_of: Callable[[Kernel], str]) -> str:
    if kernel.kind in ("collective", "between"):
        return "reduce"
    if kernel.kind == "to_card":
        return "copy"
    return part_of(kernel)


def _parts_by_launch(trace: Trace) -> Callable[[Kernel], str]:
    """Which part of a step a kernel belongs to: what its launching thread, or the script's, was in."""
    named: dict[str, list[tuple[float, float, str]]] = {}
    everywhere: list[tuple[float, float, str]] = []
    for span in (*trace.spans, *trace.backwards):
        what = {"replay": "backward", "copy": "forward"}.get(span.what, span.what)
        if what in ("forward", "backward", "update"):
            named.setdefault(span.thread, []).append((span.start, span.end, what))
            everywhere.append((span.start, span.end, what))
    look = {thread: _lookup(found) for thread, found in named.items()}
    anywhere = _lookup(everywhere)

    def part(kernel: Kernel) -> str:
        if kernel.launched is None:
            return "forward"
        own = look[kernel.thread](kernel.launched) if kernel.thread in look else ""
        return own or anywhere(kernel.launched) or "forward"

    return part


def _lookup(found: list[tuple[float, float, str]]) -> Callable[[float], str]:
    """The innermost of these spans that holds a moment; empty for none."""
    found = sorted(found)
    starts = [start for start, _, _ in found]

    def at(moment: float) -> str:
        place = bisect_right(starts, moment) - 1
        for start, end, what in reversed(found[max(0, place - 64) : place + 1]):
            if start <= moment < end:
                return what
        return ""

    return at
