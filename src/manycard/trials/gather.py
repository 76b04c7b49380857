"""Facts for a plan: measured on the cards that are here, or derived from data sheets for cards that aren't."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from manycard.cards import Card, read_host
from manycard.engine.batches.batch import map_tensors
from manycard.planner import CardFacts, Facts, ModelFacts, StepFacts, StepPoint
from manycard.planner.card_models import derived_ms, parse_cards_model
from manycard.strategies import STRATEGIES
from manycard.strategies.card_memory import state_ratio
from manycard.trials.confirm import Timing
from manycard.trials.estimate import Counted, count_step, largest_part_mib, tensors_mib
from manycard.trials.links import card_speeds, measure_links
from manycard.trials.one_card import measure_one_card
from manycard.trials.subject import Subject, preserving_draws

__all__ = ["gather_facts", "stated_facts"]

_MIB = 2**20
_HALF_ACTIVATIONS = 0.55
"""Activations under autocast over those in fp32: 0.53 for ResNet-50, 0.62 for GPT-2."""
_LAUNCH_MS = 0.06
"""Host cost of an operator and its backward pass, where it can't be measured: 45 to 75 us on H200 hosts."""


def gather_facts(
    subject: Subject,
    cards: Sequence[Card],
    *,
    timing: Timing | None = None,
    compile_too: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Facts:
    """Measure what a plan of `subject` on `cards` needs.

    Raises:
        ManycardError: one step on one card doesn't work.
    """
    simulated = cards[0].simulated
    with preserving_draws(cards):
        step = measure_one_card(subject, cards[0], len(cards), timing or Timing(), compile_too=compile_too, say=say)
        counted = _counted(subject, -(-subject.samples // len(cards)))
        model = _model_facts(subject, counted)
        if counted is not None:
            step = replace(step, launches=len(counted.operators))
        if counted is not None and (simulated or not step.eager):
            step = _with_estimated_memory(step, model, counted, subject)
        if len(cards) > 1 and not simulated:
            say("measuring the links between the cards")
        links, speeds = measure_links(cards), card_speeds(cards)
    return Facts(
        cards=tuple(CardFacts(card.model, _room_mib(card), speed) for card, speed in zip(cards, speeds, strict=True)),
        model=model,
        batch=subject.samples,
        step=step,
        links=links,
        cores=read_host().cores,
        written=subject.written,
        input_rate=subject.input_rate,
        simulated=simulated,
        built=tuple(STRATEGIES),
        unmeasured=_unmeasured(cards, counted),
    )


def stated_facts(
    subject: Subject, cards_model: str, *, machines: int = 1, network_gb_per_s: float | None = None, batch: int
) -> Facts:
    """Facts of cards that aren't here, from their makers' data sheets.

    Raises:
        SettingError: `cards_model` names no known cards, or several machines have no network.
    """
    cards, links, product = parse_cards_model(cards_model)
    all_cards = len(cards) * machines
    with preserving_draws(()):
        shard = -(-batch // all_cards)
        sizes = sorted({max(1, shard // 2), shard, batch})
        counts = [_count(subject, size) for size in sizes]
    model = _model_facts(subject, counts[0])
    half = _activation_share(subject)
    fixed = model.parameters_mib + model.gradients_mib + model.state_mib
    points = [
        StepPoint(
            size,
            derived_ms(counted.operators, product, subject.precision),
            fixed + half * counted.activations_mib + size * model.input_mib,
        )
        for size, counted in zip(sizes, counts, strict=True)
    ]
    launches = len(counts[0].operators)
    host = _LAUNCH_MS * launches
    eager = tuple(replace(point, ms=max(point.ms or 0.0, host)) for point in points)
    step = StepFacts(eager, tuple(points), host_ms=host, launches=launches, stated=True)
    return Facts(
        cards,
        model,
        batch,
        step,
        replace(links, network_gb_per_s=network_gb_per_s),
        machines,
        cores=8 * len(cards),
        written=subject.written,
        built=tuple(STRATEGIES),
        unmeasured=(f"The cards' figures: {product.source}.", f"A launch is taken to cost {1e3 * _LAUNCH_MS:.0f} us."),
    )


def _counted(subject: Subject, samples: int) -> Counted | None:
    try:
        return _count(subject, samples)
    except Exception:
        return None  # an estimate: what it can't follow, the trials measure


def _count(subject: Subject, samples: int) -> Counted:
    held = subject.samples

    def of_size(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() and tensor.shape[0] == held:
            return tensor[:1].expand(samples, *tensor.shape[1:])
        return tensor

    return count_step(subject.loss_fn, subject.module, map_tensors(of_size, subject.batch))


def _model_facts(subject: Subject, counted: Counted | None) -> ModelFacts:
    parameters = list(subject.module.parameters())
    trained = sum(p.nbytes for p in parameters if p.requires_grad) / _MIB
    ratio = max((state_ratio(optimizer) for optimizer in subject.optimizers), default=0.0)
    shards = counted.samples if counted is not None else 1
    return ModelFacts(
        subject.name,
        parameters_mib=sum(p.nbytes for p in parameters) / _MIB,
        gradients_mib=trained,
        state_mib=ratio * trained,
        input_mib=tensors_mib(subject.batch) / subject.samples,
        output_mib=0.0 if counted is None else counted.output_mib / shards * (0.5 if _is_half(subject) else 1.0),
        largest_part_mib=largest_part_mib(subject.module),
    )


def _with_estimated_memory(step: StepFacts, model: ModelFacts, counted: Counted, subject: Subject) -> StepFacts:
    """Memory of a step on a card, counted: where the CPU plays the card, or where not even one sample fits."""
    fixed = model.parameters_mib + model.gradients_mib + model.state_mib
    each = _activation_share(subject) * counted.activations_mib / counted.samples + model.input_mib
    known = step.eager or (StepPoint(1, None), StepPoint(2, None))
    points = tuple(replace(point, peak_mib=fixed + each * point.samples) for point in known)
    return replace(step, eager=points)


def _activation_share(subject: Subject) -> float:
    return _HALF_ACTIVATIONS if _is_half(subject) else 1.0


def _is_half(subject: Subject) -> bool:
    return subject.precision in ("bf16", "fp16")


def _room_mib(card: Card) -> float | None:
    """What training may take: what is free, and what this process holds already."""
    if card.simulated:
        return None
    free, _ = torch.cuda.mem_get_info(card.device)
    return (free + torch.cuda.memory_reserved(card.device)) / _MIB


def _unmeasured(cards: Sequence[Card], counted: Counted | None) -> tuple[str, ...]:
    said = []
    if cards[0].simulated:
        said.append("Links, the host's cost of launches and CUDA graphs were not measured: the cards are simulated.")
        said.append("Memory a card is counted from what a backward pass keeps, not measured.")
    if counted is None:
        said.append("The model's operators could not be counted: its outputs' size and launches aren't known.")
    return tuple(said)
