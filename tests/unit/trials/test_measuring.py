"""What is done with measurements of real cards, with the readings of cards planted."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manycard.cards import Card, choose_cards
from manycard.errors import ManycardError
from manycard.planner import Candidate, Measured
from manycard.strategies import make_strategy
from manycard.trials import gather, links, one_card
from manycard.trials.confirm import Timing, _held_mib, _peak_mib
from manycard.trials.subject import Subject


class RealCard(Card):
    """A card that passes for a GPU and lives on the CPU."""

    @property
    def simulated(self) -> bool:
        return False


CARDS = [RealCard(place, torch.device("cpu"), "planted", f"GPU-{place}") for place in range(2)]


def squared(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def subject(samples: int) -> Subject:
    model = nn.Linear(4, 2)
    return Subject("net", model, (torch.optim.SGD(model.parameters(), lr=0.1),), squared, torch.ones(samples, 4))


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """One card's planted behaviour: 1 ms and 10 MiB a sample beside 5 ms and 100 MiB."""
    planted: dict[str, Any] = {"room": 10_000, "graphs": True, "tried": []}

    def run(subject: Subject, candidate: Candidate, cards: Any, timing: Any, *, batch: Any) -> Measured:
        samples = len(batch)
        planted["tried"].append((candidate.name, samples))
        if 100 + 10 * samples > planted["room"]:
            return Measured(error="out of memory: planted")
        if candidate.graphs and not planted["graphs"]:
            return Measured(error="forward waits for the card")
        return Measured((2.0 if candidate.graphs else 5.0) + samples, 100.0 + 10 * samples)

    monkeypatch.setattr(one_card, "run_candidate", run)
    monkeypatch.setattr(one_card, "_host_ms", lambda *_: 4.0)
    return planted


def test_the_shard_its_half_and_the_whole_batch_are_measured(readings: dict[str, Any]) -> None:
    facts = one_card.measure_one_card(subject(64), CARDS[0], 2, Timing())
    assert [(p.samples, p.ms, p.peak_mib) for p in facts.eager] == [(16, 21, 260), (32, 37, 420), (64, 69, 740)]
    assert [(p.samples, p.ms) for p in facts.graphed] == [(32, 34), (64, 66)]
    assert facts.host_ms == 4.0
    assert not facts.compiled


def test_compiled_steps_are_measured_where_they_are_asked_for(readings: dict[str, Any]) -> None:
    facts = one_card.measure_one_card(subject(64), CARDS[0], 2, Timing(), compile_too=True)
    assert [point.samples for point in facts.compiled] == [64]


def test_sizes_that_do_not_fit_are_halved(readings: dict[str, Any]) -> None:
    readings["room"] = 200
    facts = one_card.measure_one_card(subject(64), CARDS[0], 2, Timing())
    assert [point.samples for point in facts.eager] == [4, 8]
    assert ("single", 64) not in readings["tried"]  # the shard didn't fit, so the whole isn't tried


def test_why_there_are_no_graphs_is_kept(readings: dict[str, Any]) -> None:
    readings["graphs"] = False
    facts = one_card.measure_one_card(subject(64), CARDS[0], 2, Timing())
    assert not facts.graphed
    assert facts.no_graphs == "forward waits for the card"


def test_a_step_that_fails_for_another_reason_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_card, "run_candidate", lambda *_, **__: Measured(error="no such shape"))
    with pytest.raises(ManycardError, match="no such shape"):
        one_card.measure_one_card(subject(8), CARDS[0], 2, Timing())


def test_a_model_of_which_not_one_sample_fits_is_planned_from_a_count(
    readings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    readings["room"] = 10
    monkeypatch.setattr(gather, "measure_links", lambda cards: links.LinkFacts())
    monkeypatch.setattr(gather, "card_speeds", lambda cards: [1.0, 1.0])
    monkeypatch.setattr(gather, "_room_mib", lambda card: 1e-5)
    monkeypatch.setattr(gather, "preserving_draws", lambda cards: nullcontext())
    facts = gather.gather_facts(subject(8), CARDS)
    assert all(point.ms is None and point.peak_mib for point in facts.step.eager)
    from manycard.planner import make_plan

    assert next(fork.taken for fork in make_plan(facts).forks if fork.name == "memory") == "no"


def test_the_host_is_timed_without_a_full_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = choose_cards("cpu:1").cards
    monkeypatch.setattr(one_card, "wait", lambda cards: None)
    monkeypatch.setattr(one_card, "release", lambda cards: None)
    monkeypatch.setattr(one_card, "preserving_draws", lambda cards: nullcontext())
    monkeypatch.setattr(one_card, "make_strategy", lambda name, _, *rest: make_strategy(name, cpu, *rest))
    given = subject(64)
    before = given.module.weight.detach().clone()
    found = one_card._host_ms(given, CARDS[0], [one_card.StepPoint(32, 1.0)])
    assert found is not None
    assert found > 0
    assert torch.equal(given.module.weight, before)


def test_links_are_read_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "wait", lambda cards: None)
    monkeypatch.setattr(links, "release", lambda cards: None)
    monkeypatch.setattr(links, "_SIZES_MIB", (1, 4))
    monkeypatch.setattr(links, "_COPY_MIB", 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    found = links.measure_links(CARDS)
    assert found.p2p is False
    assert found.ranks == 2
    assert [size for size, _ in found.all_reduce] == [1.0, 4.0]
    assert all(ms > 0 for _, ms in found.all_reduce)
    assert found.copy_gb_per_s is not None
    assert found.copy_gb_per_s > 0
    assert links.measure_links(choose_cards("cpu:2").cards).all_reduce == ()


def test_speeds_are_over_the_first_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "release", lambda cards: None)
    times = iter([2.0, 4.0])
    monkeypatch.setattr(links, "_best_ms", lambda work, cards: next(times))
    assert links.card_speeds(CARDS) == [1.0, 0.5]
    assert links.card_speeds(choose_cards("cpu:3").cards) == [1.0, 1.0, 1.0]


def test_memory_of_a_trial_leaves_out_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = torch.ones(2**18)  # 1 MiB, which is the trial's
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 101 * 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 300 * 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 400 * 2**20)
    held = _held_mib(CARDS[:1], batch)
    assert held == [100.0]
    assert _peak_mib(CARDS[:1], held, graphs=False) == 200.0
    assert _peak_mib(CARDS[:1], held, graphs=True) == 300.0
    assert _peak_mib(CARDS[:1], (), graphs=False) == 300.0
    assert _peak_mib(choose_cards("cpu:2").cards, (), graphs=False) is None
