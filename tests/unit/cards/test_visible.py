"""CUDA_VISIBLE_DEVICES against torch's own reading of it, and the parts of it that torch leaves to CUDA."""

from __future__ import annotations

import os
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manycard.cards.visible import Visible, map_visible, match_properties, visible_now, why_torch_sees_none
from tests.unit.cards.machines import card, sliced

FOUR = [card(index) for index in range(4)]
UUIDS = [info.uuid for info in FOUR]


def order_of(visible: Visible) -> list[int]:
    return [info.index for info in visible.cards]


def torch_reads(value: str) -> list[int]:
    """NVML's indices in torch's order, as torch itself reads the variable on a machine with those four cards."""
    with patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": value}):
        entries = torch.cuda._parse_visible_devices()
    if entries and isinstance(entries[0], str):
        return torch.cuda._transform_uuid_to_ordinals(entries, UUIDS)
    numbers = [int(entry) for entry in entries]
    return next((numbers[:place] for place, number in enumerate(numbers) if number >= len(FOUR)), numbers)


numbers = st.one_of(
    st.integers(-2, 6).map(str),
    st.sampled_from(["", " 1", "2 ", "+3", "1st", "03", "none", "NoDevFiles", "1.5", "0x1"]),
)
uuids = st.one_of(
    st.sampled_from(UUIDS),
    st.tuples(st.sampled_from(UUIDS), st.integers(4, 12)).map(lambda cut: cut[0][: cut[1]]),
    st.sampled_from(["GPU-", "GPU-zz", "gpu-0000", " GPU-0001", UUIDS[1] + "0"]),
)
lists = st.lists(st.one_of(numbers, uuids), min_size=1, max_size=5).map(",".join)


@given(st.one_of(lists, st.lists(numbers, min_size=1, max_size=5).map(",".join)))
def test_every_list_is_read_as_torch_reads_it(value: str):
    assert order_of(map_visible(value, FOUR)) == torch_reads(value)


@given(
    st.one_of(lists, st.text(max_size=12)), st.integers(0, 4), st.sampled_from([None, "PCI_BUS_ID", "FASTEST_FIRST"])
)
def test_what_any_text_leaves_is_cards_of_the_machine_each_once(value: str, count: int, order: str | None):
    visible = map_visible(value, FOUR[:count], order=order)
    assert len(set(order_of(visible))) == len(visible.cards) <= count
    assert all(info in FOUR[:count] for info in visible.cards)
    if len(visible.cards) < len(value.split(",")):
        assert visible.said, "something was ignored without a word"


@given(st.permutations(range(4)), st.booleans())
def test_a_full_list_is_a_permutation(order: list[int], by_uuid: bool):
    names = [UUIDS[index] if by_uuid else str(index) for index in order]
    visible = map_visible(",".join(names), FOUR)
    assert order_of(visible) == order
    assert visible.said == ()


@given(st.permutations(range(4)), st.integers(0, 4), st.sampled_from(["-1", "9", "x", "", "GPU-ffff"]))
def test_a_wrong_entry_cuts_the_list(order: list[int], place: int, wrong: str):
    entries = [str(index) for index in order]
    entries.insert(place, wrong)
    visible = map_visible(",".join(entries), FOUR)
    assert order_of(visible) == order[:place]
    assert repr(wrong) in visible.said[0]


def test_unset_shows_every_card():
    assert order_of(map_visible(None, FOUR)) == [0, 1, 2, 3]


@pytest.mark.parametrize("value", ["", "-1", " "])
def test_empty_and_minus_one_hide_every_card_and_say_so(value: str):
    visible = map_visible(value, FOUR)
    assert visible.cards == ()
    assert "hides every card" in visible.said[0]


def test_one_card_named_twice_hides_all():
    for value in ("0,1,0", f"{UUIDS[0]},{UUIDS[0][:8]}"):
        visible = map_visible(value, FOUR)
        assert visible.cards == ()
        assert "named before" in visible.said[0]


def test_a_prefix_that_fits_several_cards_is_named():
    assert map_visible("GPU-000", FOUR).said == (
        "CUDA_VISIBLE_DEVICES='GPU-000': 'GPU-000' fits 4 cards; CUDA ignores it and what follows",
    )


def test_unequal_cards_are_numbered_fastest_first_unless_by_bus():
    mixed = [card(0, "T4"), card(1, "H200"), card(2, "A100")]
    fastest = map_visible(None, mixed)
    assert order_of(fastest) == [1, 2, 0]
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in fastest.said[0]
    assert order_of(map_visible("2,0", mixed)) == [0, 1]
    by_bus = map_visible("2,0", mixed, order="PCI_BUS_ID")
    assert (order_of(by_bus), by_bus.said) == ([2, 0], ())


class TestSlices:
    machine = (sliced(0, 2), card(1, "A100"))

    def test_a_process_sees_one_slice_and_nothing_beside_it(self):
        visible = map_visible(None, self.machine)
        assert [info.uuid for info in visible.cards] == ["MIG-00000000-5555"]
        assert "one MIG slice" in visible.said[0]

    def test_a_slice_by_its_id(self):
        second = self.machine[0].slices[1]
        (shown,) = map_visible(second.uuid, self.machine).cards
        assert (shown.uuid, shown.slice_of) == (second.uuid, self.machine[0].uuid)
        (shown,) = map_visible(second.uuid[:12], self.machine).cards
        assert shown.uuid == second.uuid

    def test_a_slice_by_its_old_id(self):
        (shown,) = map_visible(f"MIG-{self.machine[0].uuid}/8/0", self.machine).cards
        assert shown.uuid == self.machine[0].slices[1].uuid

    def test_an_unknown_slice_shows_nothing(self):
        visible = map_visible("MIG-ffff", self.machine)
        assert visible.cards == ()
        assert "is no MIG slice" in visible.said[0]

    def test_the_whole_card_beside_is_shown_alone(self):
        assert order_of(map_visible("1", self.machine)) == [1]

    def test_mig_mode_without_slices_shows_nothing_of_the_card(self):
        visible = map_visible(None, [sliced(0, 0), card(1, "A100")])
        assert order_of(visible) == [1]
        assert "has no slice" in visible.said[0]


def properties(uuid: str, name: str = "NVIDIA H200") -> SimpleNamespace:
    """What torch tells of a device: the UUID without NVML's prefix."""
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    return SimpleNamespace(name=name, total_memory=1024, uuid=bare, major=9, minor=0)


@given(st.permutations(range(4)), st.integers(1, 4))
def test_torch_s_uuids_win_over_the_rules(order: list[int], count: int):
    seen = [properties(UUIDS[index]) for index in order[:count]]
    assert order_of(match_properties(seen, FOUR, map_visible(None, FOUR))) == order[:count]


def test_a_device_that_the_inventory_lacks_comes_from_torch():
    visible = match_properties([properties("GPU-ffff", "AMD Instinct")], [], Visible(()))
    (info,) = visible.cards
    assert (info.name, info.memory_total, info.memory_free, info.capability) == ("AMD Instinct", 1024, None, (9, 0))
    assert visible.said == ()
    assert (
        "no card that the driver's inventory lists"
        in match_properties([properties("GPU-ffff"), properties(UUIDS[0])], FOUR, Visible(())).said[0]
    )


def test_slices_that_a_newer_driver_shows_together():
    machine = [sliced(0, 2)]
    seen = [properties(part.uuid) for part in machine[0].slices]
    visible = match_properties(seen, machine, map_visible(None, machine))
    assert [info.uuid for info in visible.cards] == [part.uuid for part in machine[0].slices]
    assert visible.said == ()


def test_a_card_in_mig_mode_is_matched_as_its_slice_though_torch_gives_the_card_s_uuid():
    machine = [sliced(0, 1)]
    (shown,) = match_properties([properties(machine[0].uuid)], machine, map_visible(None, machine)).cards
    assert shown.uuid == machine[0].slices[0].uuid


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card for torch here")
def test_why_torch_sees_none(monkeypatch: pytest.MonkeyPatch):
    assert visible_now([], "the driver is on holiday").said == ("the driver is on holiday",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert visible_now(FOUR).said == ("CUDA_VISIBLE_DEVICES='-1' hides every card",)


def test_a_torch_for_the_cpu_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built for the CPU only" in why_torch_sees_none(FOUR)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "CUDA 13.0" in why_torch_sees_none(FOUR)


def test_a_torch_that_fails_to_start_leaves_the_rules(monkeypatch: pytest.MonkeyPatch):
    def fail(index: int) -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.\nUse spawn")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    visible = visible_now(FOUR)
    assert order_of(visible) == [3, 1]
    assert visible.said == ("torch can't tell which cards it sees: Cannot re-initialize CUDA in forked subprocess",)
