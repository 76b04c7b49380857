"""Two recordings compared: every cause planted in made-up ones, and none where there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from manycard.script.verify.comparing import Report, compare
from manycard.script.verify.recording import Call, OptimizerRecord, Recording, StepRecord, sketch, together
from manycard.script.verify.samples import join_rows, rows_of, same_rows

NAMES = ("fc.weight", "fc.bias")
STEPS = 6
Change = Callable[[int, StepRecord], StepRecord]


def _draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _gradients(number: int) -> tuple[Tensor, ...]:
    return _draw(100 + number, 30), _draw(200 + number, 3)


def _batch(number: int, samples: int = 8) -> Tensor:
    return _draw(300 + number, samples, 5)


def _call(batch: Tensor) -> tuple[Call, ...]:
    return (Call("Net", rows_of(batch)),)


def _step(number: int) -> StepRecord:
    return StepRecord(
        0,
        (1.0 + 0.1 * number,),
        (0.1,),
        _gradients(number),
        (_draw(400 + number, 30), _draw(500 + number, 3)),
        before=(_draw(1, 30), _draw(2, 3)) if number == 0 else (),
        calls=_call(_batch(number)),
        epoch=1 + number // 3,
        backward_at="train.py:7",
        step_at="train.py:8",
    )


def _recording(change: Change = lambda number, step: step, **known: Any) -> Recording:
    steps = tuple(change(number, _step(number)) for number in range(STEPS))
    return Recording(steps, (OptimizerRecord("SGD", NAMES),), ended="steps", **known)


def _ranks(change: Callable[[int, int, StepRecord], StepRecord] = lambda rank, number, step: step) -> list[Recording]:
    """Two ranks with half of each batch."""

    def of_rank(rank: int) -> Change:
        def changed(number: int, step: StepRecord) -> StepRecord:
            own = replace(step, calls=_call(_batch(number).chunk(2)[rank]))
            return change(rank, number, own)

        return changed

    return [_recording(of_rank(rank)) for rank in range(2)]


def _times(step: StepRecord, factor: float) -> StepRecord:
    return replace(step, gradients=tuple(g * factor for g in step.gradients if g is not None))


def _causes(report: Report, severity: str = "") -> list[str]:
    return [cause.cause for cause in report.causes if severity in ("", cause.severity)]


def _only_cause(report: Report, words: str) -> None:
    assert len(report.causes) == 1, report.causes
    assert words in report.causes[0].cause, report.causes


def _from(first: int, change: Change) -> Change:
    return lambda number, step: change(number, step) if number >= first else step


def test_equal_runs_are_the_same_training() -> None:
    report = compare(_recording(), [_recording()], 2)
    assert report.same
    assert report.first is None
    assert report.causes == ()
    assert len(report.steps) == STEPS
    assert (report.loss, report.gradient.value, report.parameter.value) == (0.0, 0.0, 0.0)


def test_ranks_that_share_the_batch_are_the_same_training() -> None:
    report = compare(_recording(), _ranks(), 2)
    assert report.same
    assert report.causes == ()


def test_ranks_in_lockstep_are_each_compared_on_the_whole_batch() -> None:
    ranks = [_recording(in_lockstep=True), _recording(in_lockstep=True)]
    report = compare(_recording(), ranks, 2)
    assert report.same
    assert report.causes == ()
    _only_cause(compare(_recording(), [_recording(), _recording()], 2), "")  # without, they repeat work
    apart = _recording(_from(2, lambda number, step: _times(step, 3.0)), in_lockstep=True)
    report = compare(_recording(), [ranks[0], apart], 2)
    assert report.first is not None
    assert (report.first.step, report.first.what) == (3, "gradient")
    assert "ranks update with gradients of their own, which were not averaged" in _causes(report)


def test_inputs_that_follow_from_draws_are_laid_to_them_in_lockstep_too() -> None:
    def redrawn(number: int, step: StepRecord) -> StepRecord:
        return replace(step, calls=_call(_batch(number + 50)))

    ranks = [_recording(_from(1, redrawn), in_lockstep=True) for _ in range(2)]
    _only_cause(compare(_recording(draws=True), ranks, 2), "forward draws at random")


def test_rounding_is_no_difference_and_its_largest_is_named() -> None:
    def nudge(number: int, step: StepRecord) -> StepRecord:
        weight, bias = step.gradients
        assert weight is not None
        return replace(step, gradients=(weight, bias + 1e-5 * weight.norm() / 3**0.5), losses=(step.losses[0] + 1e-6,))

    report = compare(_recording(), [_recording(nudge)], 2)
    assert report.same
    assert report.gradient.name == "fc.bias"
    assert report.gradient.value == pytest.approx(1e-5, rel=1e-3)
    assert report.loss == pytest.approx(1e-6, rel=1e-3)


def test_the_first_difference_is_found_at_its_step_and_line() -> None:
    def spoil(number: int, step: StepRecord) -> StepRecord:
        weight, bias = step.gradients
        assert weight is not None
        return replace(step, gradients=(weight + 0.1 * _draw(9, 30), bias))

    report = compare(_recording(), [_recording(_from(2, spoil))], 2)
    assert not report.same
    assert report.first is not None
    assert (report.first.step, report.first.what, report.first.name) == (3, "gradient", "fc.weight")
    assert report.first.where == "train.py:7"
    _only_cause(report, "no cause known")


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("loss", lambda number, step: replace(step, losses=(step.losses[0] * 1.001,))),
        ("loss", lambda number, step: replace(step, losses=(float("nan"),))),
        ("loss", lambda number, step: replace(step, losses=step.losses * 2)),
        ("gradient", lambda number, step: replace(step, gradients=(step.gradients[0], None))),
        ("learning rate", lambda number, step: replace(step, rates=(0.1001,))),
        ("parameter", lambda number, step: replace(step, parameters=(step.parameters[0] * 1.01, step.parameters[1]))),
    ],
)
def test_each_kind_of_difference_is_told(what: str, change: Change) -> None:
    report = compare(_recording(), [_recording(_from(1, change))], 2)
    assert report.first is not None
    assert (report.first.step, report.first.what) == (2, what)
    assert _causes(report)


def test_fewer_steps_are_a_difference() -> None:
    shorter = _recording()
    report = compare(_recording(), [replace(shorter, steps=shorter.steps[:4])], 2)
    assert report.first is not None
    assert (report.first.step, report.first.what) == (5, "number of steps")
    _only_cause(report, "different numbers of steps")


def test_other_starts_are_told_as_seeds() -> None:
    def other(number: int, step: StepRecord) -> StepRecord:
        return replace(step, before=(_draw(8, 30), step.before[1]) if step.before else ())

    report = compare(_recording(), [_recording(other)], 2)
    assert report.first is not None
    assert (report.first.what, report.first.name) == ("initial parameters", "fc.weight")
    _only_cause(report, "seed")


@pytest.mark.parametrize(("factor", "words"), [(0.25, "the loss is a sum"), (4.0, "added up")])
def test_a_gradient_that_is_a_multiple_by_the_cards(factor: float, words: str) -> None:
    report = compare(_recording(), [_recording(lambda number, step: _times(step, factor))], 4)
    _only_cause(report, words)


def test_a_clipped_sum_is_told_by_its_loss() -> None:
    report = compare(_recording(), [_recording(lambda _, step: replace(step, losses=(step.losses[0] / 4,)))], 4)
    _only_cause(report, "the loss is a sum")


def test_accumulation_without_scaling() -> None:
    def three(number: int, step: StepRecord) -> StepRecord:
        return replace(step, losses=step.losses * 3)

    plain, scaled = _recording(three), _recording(lambda number, step: _times(three(number, step), 3))
    _only_cause(compare(plain, [scaled], 2), "micro-batches")


def test_batchnorm_and_draws_are_named_only_where_numbers_differ() -> None:
    def noisy(number: int, step: StepRecord) -> StepRecord:
        return replace(step, losses=(step.losses[0] * 1.3,))

    _only_cause(compare(_recording(), [_recording(noisy, batchnorm=("ResNet",))], 2), "BatchNorm")
    _only_cause(compare(_recording(draws=True), [_recording(noisy)], 2), "draws at random")
    assert compare(_recording(draws=True), [_recording(batchnorm=("ResNet",))], 2).causes == ()


def test_inputs_that_follow_from_forward_are_laid_to_it() -> None:
    """A discriminator sees what a generator with BatchNorm has drawn."""

    def others(number: int, step: StepRecord) -> StepRecord:
        return replace(step, calls=(*step.calls, *_call(_batch(number) * 1.1)))

    plain = _recording(lambda number, step: replace(step, calls=step.calls * 2))
    report = compare(plain, [_recording(others, batchnorm=("Generator",))], 2)
    assert report.first is not None
    assert report.first.what == "data"
    _only_cause(report, "BatchNorm")


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        (lambda number: 0.2, "multiplied by the number of cards"),
        (lambda number: 0.1 * 0.5 ** (2 * number), "2 steps at a time"),
        (lambda number: 0.05 + number, "the learning rate differs"),
    ],
)
def test_learning_rates(rates: Callable[[int], float], words: str) -> None:
    falling = "at a time" in words
    one = _recording(lambda number, step: replace(step, rates=(0.1 * 0.5**number if falling else 0.1,)))
    report = compare(one, [_recording(lambda number, step: replace(step, rates=(rates(number),)))], 2)
    assert report.first is not None
    assert report.first.where == "train.py:8"
    _only_cause(report, words)


def test_samples_in_another_order_and_other_samples() -> None:
    def reversed_steps(number: int, step: StepRecord) -> StepRecord:
        return replace(step, calls=_call(_batch(STEPS - 1 - number)))

    def turned(number: int, step: StepRecord) -> StepRecord:
        return replace(step, calls=_call(_batch(number).flip(0)))

    def others(number: int, step: StepRecord) -> StepRecord:
        return replace(step, calls=_call(_batch(number + 50)))

    for change, words in (
        (reversed_steps, "samples come in another order"),
        (turned, "samples of a batch come in another order"),
        (others, "the inputs are other ones"),
    ):
        report = compare(_recording(), [_recording(change)], 2)
        assert report.first is not None
        assert (report.first.step, report.first.what) == (1, "data")
        _only_cause(report, words)


def test_inputs_that_another_module_computed_may_differ_in_their_last_bits() -> None:
    def nudged(number: int, step: StepRecord) -> StepRecord:
        return replace(step, calls=_call(_batch(number) * (1 + 1e-6)))

    assert compare(_recording(), [_recording(nudged)], 2).same


def test_rows_are_told_apart_by_whole_numbers_and_by_order() -> None:
    tokens = torch.randint(50_000, (6, 1024), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[3, 700] += 1
    assert not same_rows(rows_of(tokens), rows_of(other), ordered=True)
    assert same_rows(rows_of(tokens), rows_of(tokens.flip(0)), ordered=False)
    assert not same_rows(rows_of(tokens), rows_of(tokens.flip(0)), ordered=True)
    assert same_rows(rows_of(tokens), join_rows([rows_of(tokens[:4]), rows_of(tokens[4:])]), ordered=True)
    assert not same_rows(rows_of(tokens), rows_of(tokens[:5]), ordered=False)


def test_ranks_without_a_sampler() -> None:
    def all_of_it(rank: int, number: int, step: StepRecord) -> StepRecord:
        return replace(step, calls=_call(_batch(number)))

    report = compare(_recording(), _ranks(all_of_it), 2)
    assert not report.same
    assert report.not_checked
    _only_cause(report, "same samples")


def test_ranks_that_walk_the_whole_set_in_orders_of_their_own() -> None:
    def shuffled(rank: int, number: int, step: StepRecord) -> StepRecord:
        place = number % 3 if rank == 0 else 2 - number % 3
        return replace(step, calls=_call(_batch(place)))

    assert "ranks train on the same samples, so that cards repeat each other's work" in _causes(
        compare(_recording(), _ranks(shuffled), 2), "error"
    )


def test_equal_samples_in_the_data_are_no_overlap() -> None:
    table = _draw(1, 4, 5)

    def few(number: int, step: StepRecord) -> StepRecord:
        places = torch.randint(4, (8,), generator=torch.Generator().manual_seed(number))
        return replace(step, calls=_call(table[places]))

    def half(rank: int, number: int, step: StepRecord) -> StepRecord:
        places = torch.randint(4, (8,), generator=torch.Generator().manual_seed(number))
        return replace(step, calls=_call(table[places.chunk(2)[rank]]))

    assert compare(_recording(few), _ranks(half), 2).causes == ()


def test_epochs_in_one_order_though_a_sampler_shuffles() -> None:
    def again(number: int, step: StepRecord) -> StepRecord:
        return replace(step, calls=_call(_batch(number % 3)))

    def again_in_ranks(rank: int, number: int, step: StepRecord) -> StepRecord:
        return replace(step, calls=_call(_batch(number % 3).chunk(2)[rank]))

    ranks = [replace(rank, shuffles=True) for rank in _ranks(again_in_ranks)]
    report = compare(_recording(again), ranks, 2)
    assert report.same
    _only_cause(report, "every epoch")
    # Where nothing shuffles, one order is what was asked for.
    assert compare(_recording(again), _ranks(again_in_ranks), 2).causes == ()
    fresh = [replace(rank, shuffles=True) for rank in _ranks()]
    assert compare(_recording(), fresh, 2).causes == ()


def test_padding_is_a_note() -> None:
    ranks = [replace(rank, padding=3) for rank in _ranks()]
    report = compare(_recording(), ranks, 2)
    assert report.same
    assert _causes(report, "note") == ["some samples are used twice in each epoch"]


def test_gradients_that_were_not_reduced() -> None:
    def own(rank: int, number: int, step: StepRecord) -> StepRecord:
        return replace(step, gradients=(_draw(rank, 30), _draw(rank, 3)))

    report = compare(_recording(), _ranks(own), 2)
    assert not report.same
    assert "ranks update with gradients of their own, which were not averaged" in _causes(report, "error")


def test_ranks_whose_parameters_are_apart() -> None:
    def start(rank: int, number: int, step: StepRecord) -> StepRecord:
        return replace(step, before=tuple(p + rank for p in step.before))

    def later(rank: int, number: int, step: StepRecord) -> StepRecord:
        return replace(step, parameters=tuple(p + rank for p in step.parameters))

    assert _causes(compare(_recording(), _ranks(start), 2)) == ["ranks start from different parameters"]
    found = _causes(compare(_recording(), _ranks(later), 2))
    assert found == ["ranks end up with different parameters from equal gradients"]


def test_uneven_shards_weighted_equally() -> None:
    def uneven(rank: int, number: int, step: StepRecord) -> StepRecord:
        batch = _batch(number)
        step = replace(step, calls=_call(batch[:5] if rank == 0 else batch[5:]))
        return replace(step, losses=(step.losses[0] * 1.02,))

    _only_cause(compare(_recording(), _ranks(uneven), 2), "different numbers of samples")


def test_a_rank_with_data_of_its_own() -> None:
    def own(rank: int, number: int, step: StepRecord) -> StepRecord:
        return replace(step, calls=_call(_batch(number + 50 * rank).chunk(2)[rank]))

    _only_cause(compare(_recording(), _ranks(own), 2), "rank 1 has data of its own")


def test_clipping_before_unscaling_is_told_though_both_do_it() -> None:
    def clipped(number: int, step: StepRecord) -> StepRecord:
        return replace(step, scaled_clip=True)

    report = compare(_recording(clipped), [_recording(clipped)], 2)
    assert report.same
    _only_cause(report, "loss scale")


def test_a_run_that_spread_nothing_says_why() -> None:
    spread = ({"name": "Net", "spread": 0, "whole": 6, "reasons": ["forward draws rows by the data"]},)
    report = compare(_recording(), [_recording(spread=spread)], 2)
    assert report.same
    _only_cause(report, "nothing was spread")
    assert report.causes[0].evidence == "forward draws rows by the data"


def test_rounding_that_grows_is_told_apart() -> None:
    def growing(number: int, step: StepRecord) -> StepRecord:
        return replace(step, losses=(step.losses[0] * (1 + 1e-7 * 10**number),))

    report = compare(_recording(), [_recording(growing)], 2)
    assert report.first is not None
    assert report.first.step == 5
    _only_cause(report, "amplifies")


def test_parameters_that_follow_rounding_are_set_aside() -> None:
    """Adam makes a step of full length of a gradient that is nothing but rounding."""

    def tiny(sign: int) -> Change:
        def change(number: int, step: StepRecord) -> StepRecord:
            weight, bias = step.gradients
            assert bias is not None
            parameters = (step.parameters[0], step.parameters[1] + sign * 0.1)
            return replace(step, gradients=(weight, sign * 1e-9 * bias), parameters=parameters)

        return change

    report = compare(_recording(tiny(1)), [_recording(tiny(-1))], 2)
    assert report.same
    assert report.set_aside == ("fc.bias",)
    real = compare(
        _recording(), [_recording(lambda _, step: replace(step, parameters=tiny(-1)(0, step).parameters))], 2
    )
    assert not real.same


def test_a_part_of_a_parameter_that_follows_rounding_is_set_aside() -> None:
    """The keys' third of an attention's bias."""
    third = torch.zeros(30)
    third[10:20] = 1.0

    def tiny(sign: int, more: float = 0.0) -> Change:
        def change(number: int, step: StepRecord) -> StepRecord:
            weight, bias = step.gradients
            assert weight is not None
            parameter = step.parameters[0] + sign * third + more * (1 - third)
            gradient = weight * (1 - third) + sign * 1e-9 * third
            return replace(step, gradients=(gradient, bias), parameters=(parameter, step.parameters[1]))

        return change

    report = compare(_recording(tiny(1)), [_recording(tiny(-1))], 2)
    assert report.same
    assert report.set_aside == ("fc.weight",)
    assert not compare(_recording(tiny(1)), [_recording(tiny(-1, more=0.01))], 2).same


def test_double_precision_is_held_to_more() -> None:
    def nudge(number: int, step: StepRecord) -> StepRecord:
        return replace(step, losses=(step.losses[0] * (1 + 1e-6),))

    assert compare(_recording(), [_recording(nudge)], 2).same
    assert not compare(_recording(precision="double"), [_recording(nudge)], 2).same
    assert compare(_recording(precision="half"), [_recording(lambda n, s: _times(s, 1.02))], 2).same


def test_losses_of_ranks_are_weighted_by_samples() -> None:
    def own(rank: int, number: int, step: StepRecord) -> StepRecord:
        batch = _batch(number)
        return replace(step, losses=(float(rank),), calls=_call(batch[:6] if rank == 0 else batch[6:]))

    joined = together(_ranks(own))
    assert joined.steps[0].losses == (0.25,)
    assert joined.steps[0].samples == 8


def test_a_sketch_keeps_norms_and_differences() -> None:
    one, other = _draw(1, 5_000_000), _draw(2, 5_000_000)
    near = one + 1e-3 * other
    assert float(sketch(one).norm()) == pytest.approx(float(one.norm()), rel=0.05)
    assert float((sketch(near) - sketch(one)).norm()) == pytest.approx(float((near - one).norm()), rel=0.05)
    assert torch.equal(sketch(one), sketch(one.clone()))


def test_a_recording_comes_back_from_its_folder(tmp_path: Path) -> None:
    def unused(number: int, step: StepRecord) -> StepRecord:
        return replace(step, gradients=(step.gradients[0], None))

    made = _recording(unused, cards=("cpu:0",), spread=({"name": "Net", "reasons": ["no"]},), asks_for=("ddp", "all"))
    made.write(tmp_path / "0")
    read = Recording.read(tmp_path / "0")
    assert replace(read, steps=()) == replace(made, steps=())
    assert len(read.steps) == STEPS
    assert compare(made, [read], 2).gradient.value == 0.0
    _equal(read.steps[0].parameters, made.steps[0].parameters)
    assert read.steps[0].gradients[1] is None


def _equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
