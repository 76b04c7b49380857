"""What --cards may say, and what it may not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manycard.cards.memory_size import in_words, parse_size
from manycard.cards.spec import parse_spec
from manycard.errors import CardsError


@pytest.mark.parametrize(
    ("spec", "kind", "count", "indices"),
    [
        ("all", "all", None, ()),
        (" ALL ", "all", None, ()),
        ("auto", "auto", None, ()),
        ("auto:3", "auto", 3, ()),
        ("2", "count", 2, ()),
        (2, "count", 2, ()),
        ("0,2", "list", None, (0, 2)),
        ("2, 0", "list", None, (2, 0)),
        ("0,", "list", None, (0,)),
        ("0,1,", "list", None, (0, 1)),
        ([0], "list", None, (0,)),
        ((3, 1), "list", None, (3, 1)),
        (range(2), "list", None, (0, 1)),
        ("cpu:4", "cpu", 4, ()),
    ],
)
def test_each_form(spec: object, kind: str, count: int | None, indices: tuple[int, ...]):
    parsed = parse_spec(spec)
    assert (parsed.kind, parsed.count, parsed.indices) == (kind, count, indices)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("cpu:0", "must be at least 1, and is 0"),
        ("cpu:-2", "must be at least 1, and is -2"),
        ("cpu:", "names no cards"),
        ("cpu", "write cpu:N"),
        ("cpu:2000", "too many"),
        ("auto:0", "must be at least 1"),
        ("0", "`0,` for card 0 alone"),
        (0, "must be at least 1"),
        ("-1", "must be at least 1"),
        (-1, "must be at least 1"),
        ("0,-1", "-1 is negative"),
        ([-1], "-1 is negative"),
        ("0,1,0", "card 0 stands there more than once"),
        ([1, 1], "card 1 stands there more than once"),
        ([], "the list is empty"),
        ("", "names no cards"),
        (",", "names no cards"),
        ("0,,1", "names no cards"),
        ("0-3", "names no cards"),
        ("two", "names no cards"),
        ("1.5", "names no cards"),
        ("²", "names no cards"),
        ("9" * 5000, "names no cards"),
        ("cuda:1", "write `1,`"),
        (True, "names no cards"),
        (1.0, "names no cards"),
        (None, "names no cards"),
        (["0", 1], "names no cards"),
        ([True], "names no cards"),
    ],
)
def test_bad_input_names_the_value_and_the_fix(spec: object, words: str):
    with pytest.raises(CardsError) as caught:
        parse_spec(spec)
    assert words in str(caught.value)
    assert repr(spec)[:60] in str(caught.value)
    assert len(str(caught.value)) < 400
    assert caught.value.fix


@given(st.one_of(st.text(max_size=20), st.text("0123456789,-:+ cpuato", max_size=12)))
def test_any_text_is_read_or_refused_in_words(text: str):
    message = ""
    try:
        parsed = parse_spec(text)
    except CardsError as refused:
        message = str(refused)
    if message:
        assert repr(text) in message
    else:
        assert parsed.count is None or parsed.count >= 1
        assert len(set(parsed.indices)) == len(parsed.indices)


@given(st.lists(st.integers(0, 99), min_size=1, unique=True))
def test_a_list_and_its_text_mean_the_same(indices: list[int]):
    text = ",".join(map(str, indices)) + ("," if len(indices) == 1 else "")
    assert parse_spec(text).indices == parse_spec(indices).indices == tuple(indices)


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("2GiB", 2 * 1024**3),
        ("2 gib", 2 * 1024**3),
        ("1.5GB", 1_500_000_000),
        ("500MB", 500_000_000),
        ("1TiB", 1024**4),
    ],
)
def test_amounts_of_memory(value: int | str, size: int):
    assert parse_size(value, setting="min_free") == size


@pytest.mark.parametrize("value", [-1, "-2GiB", "two", "2 bananas", "", "1.5", True, 1.5, None])
def test_no_amount_of_memory(value: object):
    with pytest.raises(CardsError, match=r"min_free=.*no amount of memory.*2GiB"):
        parse_size(value, setting="min_free")


def test_amounts_in_words():
    assert (in_words(1536 * 1024**2), in_words(300 * 1024**2), in_words(None)) == ("1.5 GiB", "300 MiB", "unknown")
