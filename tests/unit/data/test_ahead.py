"""Batches in the making: the same batches in the same order, never too many, and dropped where nobody wants them."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from manycard.data.ahead import DEPTH, Pending, allowed, collate_pending, finished_ahead


class Later(Pending):
    """Counts what is asked of it."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.state = "begun"

    def result(self) -> Any:
        self.state = "asked"
        if isinstance(self.value, Exception):
            raise self.value
        return self.value

    def drop(self) -> None:
        self.state = "dropped"


def walk(batches: list[Any], fetched: list[Any]) -> Generator[tuple[Any, int], None, None]:
    for number, batch in enumerate(batches):
        fetched.append(batch)
        yield batch, number


def test_order_and_what_goes_with_each_batch_are_kept() -> None:
    batches = [Later(number) for number in range(7)]
    assert list(finished_ahead(walk(batches, []))) == [(number, number) for number in range(7)]


def test_further_batches_are_begun_before_one_is_waited_for() -> None:
    batches, fetched = [Later(number) for number in range(7)], []
    whole = finished_ahead(walk(batches, fetched))
    next(whole)
    assert len(fetched) == 1 + DEPTH
    assert [batch.state for batch in fetched] == ["asked"] + ["begun"] * DEPTH


def test_batches_that_are_there_are_not_fetched_ahead() -> None:
    fetched: list[Any] = []
    whole = finished_ahead(walk([1, 2, 3], fetched))
    assert next(whole) == (1, 0)
    assert fetched == [1]
    assert list(whole) == [(2, 1), (3, 2)]


def test_parts_of_a_batch_may_be_pending() -> None:
    batch = {"images": Later("some"), "pair": (Later(1), [Later(2)]), "label": 3}
    assert [found for found, _ in finished_ahead(walk([batch], []))] == [
        {"images": "some", "pair": (1, [2]), "label": 3}
    ]


def test_a_batch_without_pending_parts_stays_the_object_it_was() -> None:
    class Named(dict[str, Any]):
        """What a script's own collating may give."""

    batch = Named(labels=[1, 2])
    assert [found is batch for found, _ in finished_ahead(walk([batch], []))] == [True]


def test_an_error_comes_where_its_batch_would() -> None:
    batches = [Later(0), Later(1), Later(ValueError("bad file")), Later(3), Later(4), Later(5)]
    whole = finished_ahead(walk(batches, []))
    assert [next(whole), next(whole)] == [(0, 0), (1, 1)]
    with pytest.raises(ValueError, match="bad file"):
        next(whole)
    assert [batch.state for batch in batches[3:5]] == ["dropped"] * 2


def test_leaving_early_drops_what_was_begun() -> None:
    batches, fetched = [Later(number) for number in range(7)], []
    whole = finished_ahead(walk(batches, fetched))
    next(whole)
    whole.close()
    assert [batch.state for batch in fetched] == ["asked"] + ["dropped"] * DEPTH


def test_only_our_own_collating_may_leave_batches_pending() -> None:
    assert not allowed()
    with pytest.raises(TypeError):
        collate_pending([object()])
    assert not allowed()
