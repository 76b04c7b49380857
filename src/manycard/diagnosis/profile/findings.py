"""From where the time goes to what to do about it, the biggest gain first. Pure.

A gain is an estimate from above: how many times as fast steps would be if that part took no time at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from manycard.diagnosis.finding import Finding
from manycard.diagnosis.profile.breakdown import CardTime

__all__ = ["Opportunity", "Setup", "find_opportunities"]

_LEAST_GAIN = 1.05
"""Below, a finding is not worth its line."""
_TINY_KERNEL = 12.0
"""Microseconds of a kernel below which launching it costs as much as running it."""


@dataclass(frozen=True)
class Opportunity:
    """A finding about speed, with what it may bring."""

    finding: Finding
    gain: float
    """Up to how many times as fast."""
    part: str = ""
    """What of a step it is about: a name of `PARTS`, ``imbalance`` or ``waits``."""

    def __str__(self) -> str:
        found = self.finding
        return f"{found.cause} ({found.evidence}; up to {self.gain:.2f}x). Fix: {found.fix}."


@dataclass(frozen=True)
class Setup:
    """What is known of the run besides its times."""

    strategy: str = ""
    """``single``, ``dp``, ``ddp``, ...; empty for a script that doesn't use manycard."""
    workers: int | None = None
    """Processes that load; None where that isn't known."""
    cores: int = 1
    graphs: bool = False
    """Whether steps were replayed as CUDA graphs."""
    optimizers: tuple[str, ...] = ()
    unfused: tuple[str, ...] = ()
    """Those of them that could use fused kernels and don't."""
    gathers: bool = False
    """Whether outputs are joined on the first card, with the loss computed there."""
    shared: tuple[tuple[str, str], ...] = ()
    """Cards on which others compute, each with one of those processes in words."""


def find_opportunities(cards: Sequence[CardTime], setup: Setup) -> list[Opportunity]:
    """What holds these steps back, the biggest gain first; nothing where all is well."""
    if not cards:
        return []
    probes: dict[str, Callable[[Sequence[CardTime], Setup], Opportunity | None]] = {
        "input": _input,
        "imbalance": _imbalance,
        "reduce": _reduce,
        "host": _host,
        "waits": _waits,
        "update": _update,
        "copy": _copies,
    }
    found = [replace(each, part=part) for part, probe in probes.items() if (each := probe(cards, setup)) is not None]
    return sorted(found, key=lambda each: -each.gain)


def _slowest(cards: Sequence[CardTime]) -> CardTime:
    return max(cards, key=lambda card: card.step - card.idle)


def _without(
    step: float, spent: float, cause: str, evidence: str, fix: str, *, least: float = _LEAST_GAIN
) -> Opportunity | None:
    gain = step / max(step - spent, step / 100)
    return Opportunity(Finding(cause, evidence, fix, "warning"), gain) if gain >= least else None


def _of_step(spent: float, step: float) -> str:
    return f"{_ms(spent)} of {_ms(step)} ms a step"


def _ms(value: float) -> str:
    return f"{value:.3g}"


def _input(cards: Sequence[CardTime], setup: Setup) -> Opportunity | None:
    card = min(cards, key=lambda card: card.input)  # what even the card that waits least spends
    more = min(max(2 * (setup.workers or 0), 4), max(setup.cores - 1, 1))
    if not setup.workers:
        fix = "load in more processes" if setup.workers is None else "load in processes of their own"
        fix += f": num_workers='auto' in parallel.loader, or num_workers={more} in a DataLoader"
    elif more > setup.workers:
        fix = f"raise num_workers from {setup.workers} to {more}"
    else:
        fix = f"{setup.workers} workers use the {setup.cores} cores there are: make samples cheaper"
    fix += "; decode images on the cards with backend='card', or keep decoded data in memory"
    evidence = f"{_of_step(card.input, card.step)} wait for the loader"
    return _without(card.step, card.input, "the cards wait for data", evidence, fix)


def _imbalance(cards: Sequence[CardTime], setup: Setup) -> Opportunity | None:
    if len(cards) < 2:
        return None
    times = {card.card: card.computing + card.copy for card in cards}
    name = max(times, key=lambda card: times[card])
    others = [value for card, value in times.items() if card != name]
    usual = sum(others) / len(others)
    simulated = all(card.simulated for card in cards)
    if usual <= 0 or times[name] < (1.5 if simulated else 1.15) * usual:  # a CPU's times scatter
        return None
    step = max(card.step for card in cards)
    mean = sum(times.values()) / len(times)
    spent = (times[name] - mean) if not simulated else step * (1 - mean / times[name])
    others_there = dict(setup.shared).get(name)
    if others_there is not None:
        why = f"another process computes there too ({others_there})"
        fix = "wait for it, or leave that card out with --cards (auto takes free ones)"
    elif name == cards[0].card and setup.gathers:
        why = "outputs are joined there, and the loss outside of the model runs on that card alone"
        fix = "compute the loss on each card: parallel.train_step(loss_fn, model, optimizer), or return it from forward"
    elif setup.strategy == "pipeline":
        why = "its stage takes longer than the others"
        fix = "cut elsewhere: stages='auto' measures where, or name other modules (pipeline.record shows what it gives)"
    else:
        why = "it has more to do for its shard than the others"
        fix = (
            "look whether that card is slower (manycard doctor: clocks, other processes), or its samples are larger "
            "(sort or pad them alike)"
        )
    evidence = f"{name} computes {_ms(times[name])} ms a step, the others {_ms(usual)} ms: {why}"
    return _without(step, spent, f"{name} holds the other cards back", evidence, fix)


def _reduce(cards: Sequence[CardTime], setup: Setup) -> Opportunity | None:
    if len(cards) < 2 and setup.strategy != "ddp":
        return None
    card = min(cards, key=lambda card: card.reduce)
    hidden = f", {_ms(card.reduce_hidden)} ms more run beside computing" if card.reduce_hidden else ""
    evidence = f"{_of_step(card.reduce, card.step)} in which nothing else runs{hidden}"
    if setup.strategy == "torch_dp":
        cause = "nn.DataParallel sends the model to every card in each step and gathers outputs and gradients"
        fix = "use mc.DataParallel(model), or the strategy dp, whose replicas stay on their cards"
        return _without(card.step, card.reduce, cause, evidence, fix)
    if setup.strategy == "ddp":
        fix = "try ddp_options={'bucket_cap_mb': 100} and, in bf16, a compressing hook; accumulate=2 halves it"
    else:
        fix = "accumulate=2 halves it; compare with --strategy ddp, which reduces while backward runs"
    fix += "; manycard doctor says whether the cards' links are as fast as they can be"
    return _without(card.step, card.reduce, "adding up gradients holds the cards up", evidence, fix)


def _host(cards: Sequence[CardTime], setup: Setup) -> Opportunity | None:
    card = min(cards, key=lambda card: card.host)
    evidence = _of_step(card.host, card.step)
    if card.simulated:
        if not card.forward:  # an unmodified script on one card: its forward passes are in its own code
            return None
        evidence = _of_step(card.own, card.step)
        cause = "the script's own code between and around the steps takes long"
        fix = "look what runs in the loop besides the step (logging, .item(), metrics, saving), and do it less often"
        return _without(card.step, card.own, cause, evidence, fix, least=1.1)
    each = 1e3 * card.computing / card.kernels if card.kernels else 0.0
    evidence += f" the cards have nothing to do; {card.kernels:.0f} kernels a step of {each:.0f} µs on average"
    if card.own > card.host / 2:
        cause = "the cards wait for the script's own code between steps"
        evidence += f", {_ms(card.own)} ms of it between steps"
        fix = "look what runs in the loop besides the step (logging, .item(), metrics, saving), and do it less often"
        return _without(card.step, card.host, cause, evidence, fix)
    fix = "parallel.train_step(..., graphs='auto') replays steps without Python; " if not setup.graphs else ""
    fix += "compile=True joins small kernels, and a larger batch makes them longer"
    small = f", so small that launching one takes longer ({_TINY_KERNEL:.0f} µs)" if each < _TINY_KERNEL else ""
    cause, evidence = "the host can't launch kernels fast enough", evidence + small
    return _without(card.step, card.host, cause, evidence, fix)


def _waits(cards: Sequence[CardTime], setup: Setup) -> Opportunity | None:
    card = cards[0]
    if card.simulated or card.waits < 1:
        return None
    lost = min(card.host, card.waiting)
    return _without(
        card.step,
        lost,
        "the script waits for the card in each step, and the card then for the script",
        f"{card.waits:.1f} waits a step, {_ms(card.waiting)} ms in all",
        "read losses and metrics every 50 steps (.item(), .cpu(), print of a tensor and `if tensor:` wait), and give "
        "copies non_blocking=True from pinned memory",
    )


def _update(cards: Sequence[CardTime], setup: Setup) -> Opportunity | None:
    card = max(cards, key=lambda card: card.update)
    if not setup.unfused:
        return None
    lost = card.update / 2
    return _without(
        card.step,
        lost,
        "the optimizer takes more time than its fused kernels would",
        f"{_of_step(card.update, card.step)} in {', '.join(setup.unfused)}",
        f"write {setup.unfused[0]}(..., fused=True); train steps with CUDA graphs do so by themselves",
    )


def _copies(cards: Sequence[CardTime], setup: Setup) -> Opportunity | None:
    card = max(cards, key=lambda card: card.copy)
    return _without(
        card.step,
        card.copy,
        "copies to the cards hold computing up",
        f"{_of_step(card.copy, card.step)} on {card.card}",
        "let parallel.loader copy ahead (to_card=True), pin memory (pin_memory=True) and copy with non_blocking=True; "
        "send bytes (uint8) and convert on the card",
    )
