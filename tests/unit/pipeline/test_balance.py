"""Where to cut, from costs."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch

from manycard.errors import ModelError
from manycard.pipeline.balance import Costs, PartCost, Room, balance, check_fits, stage_bytes

MIB = 2**20


def costs(*seconds: float, size: int = 0, kept: int = 0) -> Costs:
    return Costs(tuple(PartCost(f"part{i}", each, size, size, kept) for i, each in enumerate(seconds)))


def free(number: int) -> list[Room]:
    return [Room(None, 1, 3)] * number


def names(number: int) -> list[str]:
    return [f"cpu:{index}" for index in range(number)]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_no_way_of_cutting_has_a_faster_slowest_stage(stages: int) -> None:
    for seed in range(20):
        drawn = torch.rand(9, generator=torch.Generator().manual_seed(seed)).tolist()
        cuts = balance(costs(*drawn), free(stages), names(stages))
        every = [_slowest(drawn, other) for other in combinations(range(1, 9), stages - 1)]
        assert _slowest(drawn, cuts) == pytest.approx(min(every))


def _slowest(seconds: list[float], cuts: tuple[int, ...] | list[int]) -> float:
    edges = [0, *cuts, len(seconds)]
    return max(sum(seconds[start:end]) for start, end in pairwise(edges))


def test_memory_moves_the_cut() -> None:
    parts = costs(1, 1, 1, 1, size=10 * MIB, kept=5 * MIB)
    # A part needs 10 + 3 * 10 and 5 a micro-batch in flight: 50 on the first stage, 45 on the last.
    rooms = [Room(60 * MIB, 2, 3), Room(200 * MIB, 1, 3)]
    assert balance(parts, free(2), names(2)) == [2]
    assert balance(parts, rooms, names(2)) == [1]
    assert stage_bytes(parts, [1], rooms) == [50 * MIB, 135 * MIB]


def test_what_fits_nowhere_is_refused_with_its_size() -> None:
    parts = Costs((PartCost("small", 1, MIB, 0, 0), PartCost("huge", 1, 500 * MIB, 500 * MIB, 0)))
    with pytest.raises(ModelError, match=r"part huge alone needs about 2.0 GiB, and no card has room for it"):
        balance(parts, [Room(1000 * MIB, 1, 3)] * 2, names(2))
    with pytest.raises(ModelError, match="no way of cutting the model into 2 stages fits: it needs about 160 MiB"):
        balance(costs(1, 1, 1, 1, size=10 * MIB), [Room(60 * MIB, 1, 3)] * 2, names(2))
    with pytest.raises(ModelError, match=r"stage 1 \(part1 to part3\) needs about 120 MiB on cpu:1, which has 100 MiB"):
        check_fits(costs(1, 1, 1, 1, size=10 * MIB), [1], [Room(100 * MIB, 1, 3)] * 2, names(2))


def test_fewer_parts_than_stages_are_refused() -> None:
    with pytest.raises(ModelError, match=r"2 parts that can be cut apart \(part0, part1\), too few for 3 stages"):
        balance(costs(1, 1), free(3), names(3))
