"""Each fork of the decision tree is reached, by recorded facts, with the number that decides it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manycard.planner import CardFacts, Facts, Measured, Plan, StepPoint, make_plan, worth_a_trial
from tests.unit.planner.recorded import H200, HOST, cifar, giant, gpt2_loop, resnet50, tiny


def taken(plan: Plan) -> dict[str, str]:
    return {fork.name: fork.taken for fork in plan.forks}


def why_not(plan: Plan, strategy: str) -> str:
    return next(row.why_not for row in plan.predictions if row.candidate.strategy == strategy)


def test_one_card_has_nothing_to_spread() -> None:
    plan = make_plan(resnet50(cards=(H200,), batch=256))
    assert taken(plan)["cards"] == "one"
    assert plan.choice.cards == 1
    assert not {"machines", "p2p", "gain"} & set(taken(plan))


def test_a_model_too_small_to_gain_stays_on_one_card() -> None:
    plan = make_plan(tiny())
    assert taken(plan)["gain"] == "no"
    assert plan.choice.cards == 1
    assert "too small" in " ".join(plan.reasons)
    # With a batch a thousand times as large there is something to spread.
    assert make_plan(tiny(batch=16_000)).choice.cards == 2


def test_what_does_not_fit_one_card_must_be_sharded_and_that_is_not_built() -> None:
    plan = make_plan(giant())
    assert taken(plan)["memory"] == "no"
    assert plan.strategy == "fsdp"
    assert "isn't" in why_not(plan, "ddp") or "needs" in why_not(plan, "ddp")
    assert any("can't be run by this manycard" in note for note in plan.notes)
    row = plan.chosen
    assert row.memory_mib is not None
    assert row.memory_mib < H200.memory_mib * 0.95  # type: ignore[operator]
    built = make_plan(giant(built=("single", "dp", "ddp", "fsdp")))
    assert built.strategy == "fsdp"
    assert not any("can't be run" in note for note in built.notes)


def test_activations_that_do_not_fit_are_computed_in_parts_of_the_same_global_batch() -> None:
    facts = resnet50(cards=(CardFacts("small", 8_000.0),) * 2)
    plan = make_plan(facts)
    assert taken(plan)["memory"] == "in parts"
    assert plan.choice.accumulate == 2
    assert plan.choice.settings()["accumulate"] == 2
    assert plan.chosen.memory_mib is not None
    assert plan.chosen.memory_mib <= 0.95 * 8_000


def test_uneven_cards_get_shares_by_speed_where_that_is_built() -> None:
    cards = (H200, replace(H200, model="older", speed=0.5))
    step = replace(resnet50().step, compiled=())
    without = make_plan(resnet50(cards=cards, step=step))
    assert taken(without)["equal"] == "no"
    assert without.strategy != "manual"
    assert "no strategy manual" in why_not(without, "manual")
    plan = make_plan(resnet50(cards=cards, step=step, built=("single", "dp", "ddp", "manual")))
    manual = next(row for row in plan.predictions if row.candidate.strategy == "manual")
    even = next(row for row in plan.predictions if row.candidate.name == "dp, graphs" and row.candidate.cards == 2)
    assert manual.candidate.weights == pytest.approx((2 / 3, 1 / 3))
    assert manual.step_ms is not None
    assert even.step_ms is not None
    # Shares by speed end together: 2/3 of the batch at full speed, where even halves wait for half speed.
    assert manual.step_ms / even.step_ms == pytest.approx(2 / 3, rel=0.05)


def test_without_p2p_the_reduction_that_overlaps_wins() -> None:
    facts = resnet50(links=HOST, step=replace(resnet50().step, compiled=()))
    plan = make_plan(facts)
    assert taken(plan)["p2p"] == "no"
    assert plan.strategy == "ddp"
    fork = next(fork for fork in plan.forks if fork.name == "p2p")
    assert "13.6" in fork.number  # ms for 97.5 MiB, between 0.4 at 1 and 14.0 at 100
    assert taken(make_plan(resnet50()))["p2p"] == "yes"


def test_several_machines_need_ranks() -> None:
    links = replace(resnet50().links, network_gb_per_s=50.0)
    plan = make_plan(resnet50(machines=4, batch=2048, links=links))
    assert taken(plan)["machines"] == "several"
    assert plan.strategy == "ddp"
    assert plan.choice.cards == 8
    assert "several machines" in why_not(plan, "single")


def test_a_notebook_has_one_process() -> None:
    facts = replace(gpt2_loop(), written="notebook")
    plan = make_plan(facts)
    assert taken(plan)["script"] == "notebook"
    assert plan.strategy == "dp"
    assert why_not(plan, "ddp") == "a notebook has one process"
    # The same loop as a script may use ranks, and then gathers no logits in dp's place.
    assert make_plan(gpt2_loop()).forks[3].taken == "loop"


def test_a_script_of_ranks_keeps_its_ranks() -> None:
    plan = make_plan(resnet50(written="ranks"))
    assert taken(plan)["script"] == "ranks"
    assert plan.strategy == "ddp"


def test_a_host_that_launches_too_slowly_calls_for_graphs() -> None:
    plan = make_plan(cifar())
    assert taken(plan)["host"] == "yes"
    assert plan.choice.graphs
    assert plan.choice.cards == 2
    assert "11.90 ms to launch (700 launches x 17.0 us), 3.20 ms to compute" in plan.forks[-1].number
    assert taken(make_plan(resnet50()))["host"] == "no"


def test_host_bound_without_graphs_on_eight_cards_calls_for_ranks() -> None:
    eager = (*cifar().step.eager, StepPoint(1024, 26.0, 3_400.0))
    step = replace(cifar().step, eager=eager, graphed=(), no_graphs="forward waits for the card")
    plan = make_plan(cifar(cards=(H200,) * 8, batch=1024, step=step))
    assert plan.strategy == "ddp"
    assert any("forward waits for the card" in note for note in plan.notes)
    dp = next(row for row in plan.predictions if row.candidate.strategy == "dp" and row.candidate.cards == 8)
    assert dp.parts["host_ms"] == pytest.approx(8 * 0.5 * 11.9)


def test_a_loader_that_is_too_slow_decides() -> None:
    plan = make_plan(resnet50(input_rate=3_000.0))
    assert taken(plan)["input"] == "no"
    assert plan.choice.cards == 1  # which computes 4,700 images/s
    assert plan.chosen.samples_per_s == pytest.approx(3_000.0)
    assert "loader" in " ".join(plan.reasons)
    fast = make_plan(resnet50(input_rate=50_000.0))
    assert taken(fast)["input"] == "yes"
    assert fast.choice.cards == 2


def test_simulated_cards_say_nothing_of_speed() -> None:
    plan = make_plan(resnet50(simulated=True))
    assert taken(plan)["simulated"] == "no"
    assert plan.strategy == "dp"
    assert plan.chosen.step_ms is None
    assert plan.chosen.samples_per_s is None
    assert any("simulated" in note for note in plan.notes)
    assert worth_a_trial(resnet50(simulated=True)) == []


def test_a_measured_time_outweighs_a_prediction() -> None:
    facts = resnet50(step=replace(resnet50().step, compiled=()))
    tried = worth_a_trial(facts)
    assert 2 <= len(tried) <= 5
    slow = {c: Measured(80.0, 11_500.0) for c in tried if c.strategy == "dp"}
    plan = make_plan(facts, slow | {c: Measured(55.0) for c in tried if c.strategy == "ddp"})
    assert plan.strategy == "ddp"
    assert plan.chosen.measured
    assert plan.chosen.predicted_ms is not None
    assert "80.00 ms" in why_not(plan, "dp")


def test_a_trial_that_failed_is_out_in_its_own_words() -> None:
    facts = cifar()
    failed = {c: Measured(error="out of memory: 3 MiB") for c in worth_a_trial(facts) if c.strategy == "dp"}
    plan = make_plan(facts, failed)
    assert plan.strategy != "dp" or plan.choice not in failed
    assert "out of memory: 3 MiB" in why_not(plan, "dp")


def test_facts_and_plans_go_through_json() -> None:
    import json

    facts = resnet50(machines=2, unmeasured=("nothing",))
    assert Facts.from_document(json.loads(json.dumps(facts.to_document()))) == facts
    document = json.loads(json.dumps(make_plan(facts).to_document()))
    assert {"strategy", "settings", "reasons", "predictions"} <= set(document)
    row = document["predictions"][0]
    assert {"strategy", "cards", "step_ms", "samples_per_s", "memory_mib", "how"} <= set(row)
    assert row["how"] in ("measured", "predicted")
