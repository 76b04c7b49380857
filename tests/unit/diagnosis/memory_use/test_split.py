"""What is said of memory that is uneven, fragmented or used by others; and of memory that is not."""

from __future__ import annotations

import pytest

from manycard.diagnosis.memory_use import CardMemory, judge_memory

GIB = 2**30
EVEN = {"parameters": GIB, "gradients": GIB, "optimizer": 2 * GIB, "activations": 8 * GIB, "peak": 12 * GIB}


def card(index: int, **other: int) -> CardMemory:
    return CardMemory(f"cuda:{index}", False, **{**EVEN, "total": 80 * GIB, "outside": GIB // 2, **other})


def test_nothing_is_said_of_even_cards() -> None:
    assert judge_memory([card(0, peak=12 * GIB + 2**20), card(1), card(2)]) == []
    assert judge_memory([card(0)]) == []
    assert judge_memory([CardMemory("cpu:0", True, other=GIB), CardMemory("cpu:1", True)]) == []


@pytest.mark.parametrize(
    ("more", "why", "fix"),
    [
        ({"activations": 18 * GIB}, "the loss outside of the model is computed there", "parallel.train_step"),
        ({"optimizer": 8 * GIB}, "the optimizer's state is on that card alone", "parallel.train_step"),
        ({"gradients": 9 * GIB}, "gradients are added up there", "parallel.train_step"),
        ({"parameters": 9 * GIB}, "a module was put on that card alone", "parallel.setup(model)"),
        ({"buffers": 8 * GIB}, "buffers were put on that card alone", "register them in the module"),
        ({"other": 9 * GIB}, "tensors that belong to no model lie there", "map_location='cpu'"),
    ],
)
def test_a_card_that_holds_more_is_named_with_the_reason(more: dict[str, int], why: str, fix: str) -> None:
    (found,) = judge_memory([card(0, peak=22 * GIB, **more), card(1)])
    assert found.cause.startswith("cuda:0 holds more than the other cards")
    assert why in found.cause
    assert fix in found.fix
    assert "peak 22.0 GiB there and 12.0 GiB on cuda:1" in found.evidence


def test_fragments_have_their_remedy() -> None:
    (found,) = judge_memory([card(0, fragments=20 * GIB)])
    assert "fragmented" in found.cause
    assert "expandable_segments:True" in found.fix


def test_contexts_of_other_ranks_on_the_first_card() -> None:
    (found,) = judge_memory([card(0, outside=4 * GIB), card(1)])
    assert found.cause.startswith("others use cuda:0: contexts of other ranks")
    assert "set_device(local_rank)" in found.fix
