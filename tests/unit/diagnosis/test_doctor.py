"""``manycard doctor`` as people and programs call it."""

from __future__ import annotations

import json

import pytest
import torch

from manycard.cli import main
from manycard.diagnosis import Facts
from tests.unit.cards.machines import card, joined, stranger
from tests.unit.diagnosis.made import made_facts


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch):
    """Let the doctor see made-up facts."""

    def put(facts: Facts) -> None:
        monkeypatch.setattr("manycard.cli.doctor.read_facts", lambda spec: facts)
        monkeypatch.setattr("manycard.cli.doctor.measure", lambda facts, on_stage=None: facts.measured)
        monkeypatch.setenv("COLUMNS", "200")

    return put


def test_json_is_one_document_with_its_four_keys(on, capsys: pytest.CaptureFixture[str]):
    machine = [card(0), card(1, free=100, processes=[stranger()]), card(2, "T4")]
    on(made_facts(machine, "auto", environment={"CUDA_VISIBLE_DEVICES": "0,1"}))
    assert main(["doctor", "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == ""
    assert set(document) == {"machine", "cards", "links", "findings"}
    assert document["machine"]["gpus"] == 3
    assert document["machine"]["driver_cuda"] == "13.0"
    rows = {row["name"]: row for row in document["cards"]}
    assert set(rows) == {"cuda:0", "cuda:1", "card 2"}
    assert (rows["cuda:0"]["chosen"], rows["cuda:0"]["left_out"]) == (True, None)
    assert "pid 4242" in rows["cuda:1"]["left_out"]
    assert rows["cuda:1"]["processes"][0]["user"] == "someone"
    assert rows["card 2"]["left_out"] == "torch doesn't see it"
    assert {tuple(row["cards"]) for row in document["links"]} == {
        ("cuda:0", "cuda:1"),
        ("cuda:0", "card 2"),
        ("cuda:1", "card 2"),
    }
    assert document["links"][0]["kind"] == "NV18"
    assert [set(finding) for finding in document["findings"]] == [{"cause", "evidence", "fix", "severity"}]


def test_an_error_is_status_1_in_both_forms(on, capsys: pytest.CaptureFixture[str]):
    on(made_facts([card(0, free=1)]))
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["severity"] == "error"
    assert main(["doctor"]) == 1
    assert "too little free memory" in capsys.readouterr().out


def test_a_warning_is_status_0(on):
    on(made_facts([card(0, free=100, processes=[stranger()])]))
    assert main(["doctor"]) == 0


def test_tables_for_people(on, capsys: pytest.CaptureFixture[str]):
    machine = [card(index) for index in range(4)]
    on(made_facts(machine, "0,2", links=joined([(0, 1), (2, 3)], count=4)))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for words in ("580.95.05 (up to CUDA 13.0)", "NVIDIA H200", "141.0 GiB", "NV18", "SYS", "2.30.7", "left out"):
        assert words in out
    assert "A run would use 2 cards: cuda:0, cuda:2 (NVIDIA H200)" in out


def test_names_from_outside_are_no_markup(on, capsys: pytest.CaptureFixture[str]):
    from manycard.cards import CardProcess

    on(made_facts([card(0, free=100, processes=[CardProcess(7, 1, user="[red]x[/]", command="[/bold]")])]))
    assert main(["doctor"]) == 0
    assert "[red]x[/]" in capsys.readouterr().out


def test_simulated_cards_on_this_machine(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--json", "--cards", "cpu:2"]) in (0, 1)
    document = json.loads(capsys.readouterr().out)
    chosen = [row["name"] for row in document["cards"] if row["chosen"]]
    assert chosen == ["cpu:0", "cpu:1"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card for torch here")
def test_without_gpus_it_ends_well_and_says_what_can_be_done(capsys: pytest.CaptureFixture[str]):
    status = main(["doctor"])
    out = capsys.readouterr().out
    assert "cpu:0" in out
    assert "--cards cpu:N" in out
    if "error" not in out:
        assert status == 0


@pytest.mark.parametrize("cards", ["0,99", "cpu:0", "nonsense"])
def test_bad_input_is_one_line_and_status_2(cards: str, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--cards", cards]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert repr(cards) in err
    assert "Fix: " in err
