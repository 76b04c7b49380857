"""Choosing among made-up machines of 0, 1, 2, 4 and 8 cards."""

from __future__ import annotations

import multiprocessing
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manycard.cards import CardChoice, CardInfo, CardProcess, Links, choose, choose_cards, own_pids, parse_spec
from manycard.errors import CardsError
from tests.unit.cards.machines import GIB, HOST, NUMA, NVLINK, card, joined, sliced, stranger

OURS = 1234


def pick(spec: object, infos: list[CardInfo], links: Links | None = None, **more: object) -> CardChoice:
    return choose(parse_spec(spec), infos, links or joined([range(8)]), own_pids={OURS}, **more)


def chosen(choice: CardChoice) -> list[str]:
    return [item.name for item in choice.cards]


def reasons(choice: CardChoice) -> dict[str, str]:
    return {out.name.split()[0]: out.reason for out in choice.left_out}


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_all_takes_every_card_and_has_nothing_to_say(count: int):
    choice = pick("all", [card(index) for index in range(count)])
    assert chosen(choice) == [f"cuda:{index}" for index in range(count)]
    assert [item.position for item in choice.cards] == list(range(count))
    assert choice.cards[-1].device == torch.device("cuda", count - 1)
    assert (choice.cards[0].model, choice.cards[0].uuid) == ("NVIDIA H200", card(0).uuid)
    assert choice.describe() == ""


@pytest.mark.parametrize("spec", ["all", "auto", "auto:2"])
def test_without_gpus_one_simulated_card_and_a_word_on_it(spec: str):
    choice = pick(spec, [], said=["no driver"])
    assert chosen(choice) == ["cpu:0"]
    assert choice.cards[0].simulated
    assert choice.describe() == "One simulated card on the CPU is used, since no driver; cpu:N simulates several."


@pytest.mark.parametrize(("spec", "words"), [("2", "no 2 cards"), ("0,9", "no card 0"), ("3,", "no card 3")])
def test_without_gpus_a_number_is_an_error(spec: str, words: str):
    with pytest.raises(CardsError, match=f"cards='{spec}'.*{words}.*no driver.*cpu:"):
        pick(spec, [], said=["no driver"])


def test_simulated_cards_need_nothing():
    choice = pick("cpu:3", [card(0)])
    assert chosen(choice) == ["cpu:0", "cpu:1", "cpu:2"]
    assert {str(item.device) for item in choice.cards} == {"cpu"}
    assert choice.describe() == ""


class TestAuto:
    def test_leaves_out_busy_cards_and_says_who_is_there(self):
        choice = pick("auto", [card(0), card(1, free=100, processes=[stranger()]), card(2), card(3)])
        assert chosen(choice) == ["cuda:0", "cuda:2", "cuda:3"]
        assert reasons(choice) == {"cuda:1": "in use by pid 4242 of someone (python train.py), 30.0 GiB"}
        assert choice.describe() == (
            "cuda:1 (NVIDIA H200) is left out: in use by pid 4242 of someone (python train.py), 30.0 GiB."
        )

    def test_our_own_processes_and_their_memory_do_not_count(self):
        choice = pick("auto", [card(0, free=1, processes=[CardProcess(OURS, 139 * GIB)]), card(1)])
        assert chosen(choice) == ["cuda:0", "cuda:1"]

    def test_a_desktop_and_a_process_without_memory_do_not_count(self):
        idle = [CardProcess(7, GIB, graphics=True), CardProcess(8, 0)]
        assert len(pick("auto", [card(0, processes=idle)]).cards) == 1

    def test_leaves_out_cards_short_of_memory(self):
        machine = [card(0, free=1.9), card(1, free=30), card(2)]
        assert chosen(pick("auto", machine)) == ["cuda:1", "cuda:2"]
        choice = pick("auto", machine, min_free=64 * GIB)
        assert chosen(choice) == ["cuda:2"]
        assert reasons(choice)["cuda:1"] == "only 30.0 GiB of 141.0 GiB are free, under 64.0 GiB"

    def test_unknown_free_memory_and_processes_are_no_reason(self):
        unknown = CardInfo(0, "NVIDIA H200", "GPU-0", "01")
        assert len(pick("auto", [unknown]).cards) == 1

    def test_prefers_equal_cards(self):
        choice = pick("auto", [card(0, "T4"), card(1), card(2), card(3, "T4")])
        assert chosen(choice) == ["cuda:1", "cuda:2"]
        assert "2 x NVIDIA H200" in reasons(choice)["cuda:0"]

    def test_many_slow_cards_can_outweigh_one_fast_one(self):
        machine = [card(0, "T4"), *[card(index, "A100") for index in range(1, 5)], card(5)]
        assert chosen(pick("auto", machine)) == ["cuda:1", "cuda:2", "cuda:3", "cuda:4"]
        assert chosen(pick("auto:1", machine)) == ["cuda:5"]

    def test_takes_at_most_the_limit_and_the_best_joined(self):
        pairs = joined([(0, 2), (1, 3)], NVLINK, HOST, 4)
        choice = pick("auto:2", [card(index) for index in range(4)], pairs)
        assert chosen(choice) == ["cuda:0", "cuda:2"]
        assert "asks for 2 cards" in reasons(choice)["cuda:1"]
        assert chosen(pick("auto:9", [card(0), card(1)])) == ["cuda:0", "cuda:1"]

    def test_the_busy_half_of_a_fast_pair_makes_the_other_pair_best(self):
        machine = [card(0, processes=[stranger()]), card(1), card(2), card(3)]
        assert chosen(pick("auto:2", machine, joined([(0, 1), (2, 3)], count=4))) == ["cuda:2", "cuda:3"]

    def test_eight_cards_on_two_sockets(self):
        machine = [card(index, "T4") for index in range(8)]
        sockets = joined([(0, 1, 6, 7), (2, 3, 4, 5)], HOST, NUMA)
        assert chosen(pick("auto:4", machine, sockets)) == ["cuda:0", "cuda:1", "cuda:6", "cuda:7"]
        machine[6] = card(6, "T4", processes=[stranger()])
        assert chosen(pick("auto:4", machine, sockets)) == ["cuda:2", "cuda:3", "cuda:4", "cuda:5"]

    def test_nothing_free_is_an_error_that_names_each_obstacle(self):
        machine = [card(0, processes=[stranger(11)]), card(1, free=0.5)]
        with pytest.raises(CardsError, match=r"cards='auto'.*cuda:0: in use by pid 11.*cuda:1: only 512 MiB"):
            pick("auto", machine)

    def test_busy_cards_stay_when_asked_for(self):
        assert len(pick("auto", [card(0, processes=[stranger()])], exclude_busy=False).cards) == 1


class TestCount:
    def test_picks_the_best_joined(self):
        choice = pick(2, [card(index) for index in range(4)], joined([(0, 3), (1, 2)], NVLINK, HOST, 4))
        assert chosen(choice) == ["cuda:0", "cuda:3"]
        assert set(reasons(choice)) == {"cuda:1", "cuda:2"}

    def test_a_busy_card_is_used_last_and_then_with_a_warning(self):
        machine = [card(0, processes=[stranger()]), card(1), card(2)]
        choice = pick("2", machine)
        assert chosen(choice) == ["cuda:1", "cuda:2"]
        assert "pid 4242" in reasons(choice)["cuda:0"]
        choice = pick("3", machine)
        assert len(choice.cards) == 3
        assert "cuda:0 is used in spite of this: in use by pid 4242" in choice.describe().lower()

    def test_unequal_cards_only_when_there_are_no_equal_ones_and_with_a_word(self):
        machine = [card(0, "T4"), card(1, "A100"), card(2, "T4")]
        assert chosen(pick("2", machine)) == ["cuda:0", "cuda:2"]
        choice = pick("3", machine)
        assert len(choice.cards) == 3
        assert "the weakest sets the pace" in choice.describe()

    def test_too_many(self):
        with pytest.raises(CardsError, match=r"cards='3': 3 cards are asked for.*sees 2: 0: NVIDIA H200.*cpu:3"):
            pick("3", [card(0), card(1)])

    def test_excluded_cards_can_leave_too_few(self):
        machine = [card(0, processes=[stranger()]), card(1)]
        with pytest.raises(CardsError, match="1 of the 2 cards can be used, and 2 must be"):
            pick("2", machine, exclude_busy=True)


class TestList:
    def test_keeps_its_order_and_its_cards(self):
        choice = pick("2,0", [card(index) for index in range(3)])
        assert chosen(choice) == ["cuda:2", "cuda:0"]
        assert [item.position for item in choice.cards] == [0, 1]
        assert reasons(choice) == {"cuda:1": "it isn't in the list"}

    def test_wins_over_a_busy_card_and_warns(self):
        choice = pick("0,", [card(0, free=1, processes=[stranger()]), card(1)], exclude_busy=True, min_free=GIB * 9)
        assert chosen(choice) == ["cuda:0"]
        assert "in use by pid 4242" in choice.describe()
        assert "only 1.0 GiB" in choice.describe()

    def test_a_card_that_is_not_there(self):
        with pytest.raises(CardsError) as caught:
            pick("0,9", [card(0), card(1, "T4")])
        assert str(caught.value) == (
            "cards='0,9': there is no card 9; torch sees 0: NVIDIA H200, 1: NVIDIA T4. Fix: name cards from 0 to 1."
        )
        with pytest.raises(CardsError, match="CUDA_VISIBLE_DEVICES hides 3 more"):
            pick("1,", [card(0)], hidden=3)


SLICED = sliced(0, 2)


class TestSlices:
    slices = tuple(SLICED.as_slice(part) for part in SLICED.slices)

    @pytest.mark.parametrize("spec", ["all", "auto"])
    def test_one_of_a_card_is_kept_and_the_other_named(self, spec: str):
        choice = pick(spec, [*self.slices])
        assert [item.uuid for item in choice.cards] == [self.slices[0].uuid]
        assert "NCCL refuses two slices of one card" in reasons(choice)["cuda:1"]

    def test_two_of_a_card_in_a_list_are_an_error(self):
        with pytest.raises(CardsError, match=r"cards='0,1': cards 0 and 1 are slices of one card"):
            pick("0,1", self.slices)
        assert chosen(pick("1,", self.slices)) == ["cuda:1"]

    def test_a_count_cannot_be_met_with_slices_of_one_card(self):
        with pytest.raises(CardsError, match="NCCL refuses two slices"):
            pick("2", self.slices)


def test_doubts_about_visibility_are_passed_on():
    assert pick("all", [card(0)], said=["'9' is no card"]).describe() == "'9' is no card."


def test_more_than_sixteen_cards_are_chosen_in_time():
    machine = [card(index) for index in range(24)]
    choice = pick("8", machine, joined([range(3, 11), range(11, 24)], count=24))
    assert chosen(choice) == [f"cuda:{index}" for index in range(3, 11)]


infos = st.lists(
    st.tuples(st.sampled_from(["H200", "A100", "T4"]), st.sampled_from([0.5, 1.9, 2, 14]), st.booleans()),
    min_size=1,
    max_size=6,
).map(lambda rows: [card(i, k, free=f, processes=[stranger()] if b else []) for i, (k, f, b) in enumerate(rows)])
specs = st.sampled_from(["all", "auto", "auto:1", "auto:3", "1", "2", "4", "0,", "1,0"])


@given(infos, specs, st.booleans())
def test_every_card_is_used_or_left_out_with_a_reason(machine: list[CardInfo], spec: str, busy_out: bool):
    try:
        choice = pick(spec, machine, exclude_busy=busy_out or None)
    except CardsError as refused:
        if not refused.fix:
            pytest.fail(f"an error without a fix: {refused}")
        return
    used, out = set(chosen(choice)), set(reasons(choice))
    assert used | out == {f"cuda:{index}" for index in range(len(machine))}
    assert not used & out
    if spec.startswith("auto"):
        places = [item.device.index for item in choice.cards]
        assert len({machine[place].name for place in places}) == 1
        assert all(not machine[place].processes for place in places)
        assert all((machine[place].memory_free or 0) >= 2 * GIB for place in places)


@given(st.permutations(range(4)), st.integers(1, 4))
def test_a_better_joined_set_never_exists(order: list[int], count: int):
    """Among equal free cards the chosen set's slowest link is the fastest that any set of that size has."""
    from itertools import combinations

    kinds = [NVLINK, HOST, NUMA]
    links = Links({(a, b): kinds[(order[a] * order[b]) % 3] for a, b in combinations(range(4), 2)})
    machine = [card(index) for index in range(4)]

    def slowest(places: tuple[int, ...]) -> int:
        return max((links.between(machine[a], machine[b]).rank for a, b in combinations(places, 2)), default=0)

    got = tuple(item.device.index for item in pick(count, machine, links).cards)
    assert slowest(got) == min(slowest(places) for places in combinations(range(4), count))


def test_summary():
    assert pick("all", [card(0), card(1)]).summary() == "2 cards: cuda:0, cuda:1 (NVIDIA H200)"
    assert pick("cpu:1", []).summary() == "1 card: cpu:0 (simulated)"


class TestThisMachine:
    def test_simulated_cards_do_not_even_look(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("pynvml.nvmlInit", lambda: pytest.fail("the driver was asked"))
        assert len(choose_cards("cpu:2").cards) == 2

    @pytest.mark.parametrize("spec", ["0,99", "cpu:0", "nonsense", 99])
    def test_bad_input(self, spec: object):
        with pytest.raises(CardsError, match=r"cards=.*Fix: "):
            choose_cards(spec)

    def test_bad_memory(self):
        with pytest.raises(CardsError, match="min_free='much'"):
            choose_cards("all", min_free="much")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card for torch here")
    def test_all_without_gpus(self):
        choice = choose_cards()
        assert chosen(choice) == ["cpu:0"]
        assert "simulated" in choice.describe()


def _pids_of_a_rank(queue: multiprocessing.Queue) -> None:
    os.environ["LOCAL_RANK"] = "1"
    queue.put((os.getpid(), os.getppid(), own_pids()))


def test_our_own_pids_are_the_family_and_for_a_rank_the_other_ranks_too():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    sibling = context.Process(target=_pids_of_a_rank, args=(queue,))
    sibling.start()
    assert {os.getpid(), sibling.pid} <= own_pids()
    pid, parent, family = queue.get(timeout=60)
    sibling.join(30)
    queue.close()
    queue.join_thread()
    assert parent == os.getpid()
    assert {pid, parent} <= family
