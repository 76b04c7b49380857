"""Memory that the CUDA allocator has taken from a card and can't use: whether there is much of it, and what helps.

Fragments are what is reserved beyond the most that was ever in use, without the pools of CUDA graphs, whose memory is
theirs alone. Two remedies are known: segments that can grow, and emptying the cache once, after what needed other sizes
(start-up, an evaluation). Which of them helps depends on the run, so that whoever can runs it again with each; here is
only decided, from figures.

Source: PyTorch, "CUDA semantics", "Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from manycard.cards import in_words
from manycard.diagnosis.finding import Finding

__all__ = ["REMEDIES", "Reserve", "Tried", "judge_fragments", "read_reserve", "reserves_of_process"]

REMEDIES = {
    "expandable": (
        "expandable segments",
        "start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
    "empty": (
        "emptying the cache once",
        "call torch.cuda.empty_cache() once, after start-up and after each evaluation, and not in the loop",
    ),
}
"""In words, and what to do."""
_LEAST = 64 * 2**20
_OF_CARD = 0.2
_OF_FULL_CARD = 0.05
_FULL = 0.9
_SLOWER = 1.05


@dataclass(frozen=True)
class Reserve:
    """What the allocator of a process has taken of a card, in bytes."""

    card: str
    reserved: int
    peak: int
    """The most that was in use at once."""
    total: int
    """The card's."""
    outside: int = 0
    """Used on the card by others."""
    graphs: int = 0
    """Of `reserved`, what pools of CUDA graphs hold."""

    @property
    def fragments(self) -> int:
        """Reserved, and never in use at once."""
        return max(self.reserved - self.graphs - self.peak, 0)

    @property
    def is_fragmented(self) -> bool:
        """Whether that is much: a fifth of the card, or a twentieth of one that is full."""
        full = self.reserved + self.outside >= _FULL * self.total
        share = _OF_FULL_CARD if full else _OF_CARD
        return self.total > 0 and self.fragments >= max(share * self.total, _LEAST)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, in bytes."""
        return asdict(self)


@dataclass(frozen=True)
class Tried:
    """What the same steps reserved under a remedy, on the card that was worst without."""

    remedy: str
    """A key of `REMEDIES`."""
    reserved: int | None = None
    """In bytes; None where it could not be tried."""
    step_ms: float | None = None
    failure: str = ""

    @property
    def words(self) -> str:
        """What came of it."""
        name = REMEDIES[self.remedy][0]
        return f"{name} failed ({self.failure})" if self.reserved is None else f"{name}: {in_words(self.reserved)}"


def read_reserve(card: str, device: torch.device) -> Reserve:
    """What this process's allocator has taken of a card."""
    stats: Mapping[str, Any] = torch.cuda.memory_stats(device)
    reserved = stats.get("reserved_bytes.all.current", 0)
    free, total = torch.cuda.mem_get_info(device)
    return Reserve(
        card,
        reserved,
        stats.get("allocated_bytes.all.peak", 0),
        total,
        max(total - free - reserved, 0),
        sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            if segment["device"] == device.index and tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
        ),
    )


def reserves_of_process() -> list[Reserve]:
    """Of every card that this process has memory on; none where there is no GPU."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    used = [index for index in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(index)]
    return [read_reserve(f"cuda:{index}", torch.device("cuda", index)) for index in used]


def judge_fragments(
    reserves: Iterable[Reserve], tried: Sequence[Tried] = (), *, why_not: str = "", step_ms: float | None = None
) -> list[Finding]:
    """What is to be said of fragments: nothing where they are few, else the remedy that has helped most.

    Args:
        reserves: of the run as it is.
        tried: what remedies have done on the card with the most fragments.
        why_not: why none was tried.
        step_ms: of the run as it is.
    """
    worst = max(reserves, key=lambda reserve: reserve.fragments, default=None)
    if worst is None or not worst.is_fragmented:
        return []
    seen = f"{in_words(worst.reserved)} of {in_words(worst.total)} reserved, of which {in_words(worst.peak)} at most"
    seen += " were in use at once"
    seen += f"; the same steps with {', with '.join(each.words for each in tried)}" if tried else ""
    seen += f"; no remedy was tried: {why_not}" if why_not and not tried else ""
    # What gives back less than half of the fragments is no remedy.
    helpful = [
        each for each in tried if each.reserved is not None and worst.reserved - each.reserved >= worst.fragments / 2
    ]
    shapes = "give batches of one shape, or of few (pad to multiples, sort by length)"
    if helpful:
        # Nearly equal ones: the first, which takes no change of the script.
        best = min(helpful, key=lambda each: round((each.reserved or 0) / max(worst.fragments, 1), 1))
        fix = f"{REMEDIES[best.remedy][1]}; it was tried here"
        if step_ms and best.step_ms and best.step_ms > _SLOWER * step_ms:
            fix += f" (steps took {best.step_ms:.3g} ms instead of {step_ms:.3g})"
    elif any(each.reserved is not None for each in tried):
        fix = f"{shapes}: neither remedy of the allocator has helped here"
    else:
        fix = f"try {REMEDIES['expandable'][1].removeprefix('start with ')}; {shapes}; {REMEDIES['empty'][1]}"
    cause = f"memory of {worst.card} is fragmented: reserved, and in pieces that nothing fits in"
    return [Finding(cause, seen, fix, "warning")]
