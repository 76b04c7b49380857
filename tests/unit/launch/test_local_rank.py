from __future__ import annotations

import argparse

import pytest

from manycard.launch.local_rank import fill_local_rank


@pytest.fixture
def _rank_two(monkeypatch: pytest.MonkeyPatch) -> None:
    # Set to itself, so that the original comes back when the test ends.
    monkeypatch.setattr(argparse._ActionsContainer, "add_argument", argparse._ActionsContainer.add_argument)
    fill_local_rank("2")


@pytest.mark.usefixtures("_rank_two")
@pytest.mark.parametrize("option", ["--local_rank", "--local-rank"])
def test_the_option_takes_the_rank_as_if_it_had_been_given(option: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(option, type=int, default=-1, dest="local_rank")
    assert parser.parse_args([]).local_rank == 2


@pytest.mark.usefixtures("_rank_two")
def test_both_spellings_required_and_in_a_group() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument_group("distributed").add_argument("--local_rank", "--local-rank", type=int, required=True)
    assert parser.parse_args([]).local_rank == 2
    assert parser.parse_args(["--local-rank", "1"]).local_rank == 1


@pytest.mark.usefixtures("_rank_two")
def test_other_options_keep_their_default() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=-1)
    assert parser.parse_args([]).rank == -1
