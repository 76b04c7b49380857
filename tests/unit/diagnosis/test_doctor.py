"""``manycard doctor`` as people and programs call it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from manycard.cards import read_machine
from manycard.cards.nccl_settings import NcclMachine, load_settings, settings_file
from manycard.cli import main
from manycard.diagnosis import Facts
from manycard.diagnosis.selecting import Selection, name_for_cuda
from manycard.diagnosis.tuning import TrialFailed
from tests.unit.cards.machines import card, joined, sliced, stranger
from tests.unit.diagnosis.made import HOST, TORCH, made_facts, well


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch):
    """Let the doctor see made-up facts."""

    def put(facts: Facts) -> None:
        monkeypatch.setattr("manycard.cli.doctor.read_facts", lambda spec: facts)
        monkeypatch.setattr("manycard.cli.doctor.cuda_hangs_at", lambda environment: "")
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


def test_links_are_a_matrix_with_what_was_measured(on, capsys: pytest.CaptureFixture[str]):
    facts = well(2)
    copies = facts.measured.copies
    facts = replace(facts, measured=replace(facts.measured, copies=(copies[0], replace(copies[1], wrong_bytes=9))))
    on(facts)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    for words in ("392", "WRONG", "5.0 x16", "host, by PCIe", "bus bandwidth", "1,700 us", "308.0 GB/s"):
        assert words in out
    assert "arrive wrong" in out


def test_the_document_holds_what_was_read_and_measured(on, capsys: pytest.CaptureFixture[str]):
    on(well(2))
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["findings"] == []
    assert document["links"][0]["copies"][0]["gb_per_s"] == 392.0
    assert document["cards"][0]["health"]["ecc"]["on"] is True
    assert document["cards"][1]["host_copies"]["to_card"] == 55.0
    assert [row["size"] for row in document["machine"]["all_reduce"]] == [1 << 20, 500 << 20]
    assert document["machine"]["nccl_sweep"] is None


def test_quick_measures_nothing(on, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    on(made_facts([card(0), card(1)]))
    monkeypatch.setattr("manycard.cli.doctor.measure", lambda *_: pytest.fail("it measured"))
    assert main(["doctor", "--quick"]) == 0
    assert "NV18" in capsys.readouterr().out


def test_quick_and_deep_together_are_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--quick", "--deep"]) == 2
    assert main(["doctor", "--select", "--deep"]) == 2
    assert "Fix: take one" in capsys.readouterr().err


class TestDeep:
    def test_it_takes_two_cards(self, capsys: pytest.CaptureFixture[str]):
        assert main(["doctor", "--deep", "--cards", "cpu:2"]) in (0, 1)
        assert "NCCL settings were not compared: that takes two GPUs" in " ".join(capsys.readouterr().out.split())

    @pytest.fixture
    def machine(self, on, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> NcclMachine:
        machine = NcclMachine(("NVIDIA H200",) * 2, "580.95.05", "2.30.7")
        monkeypatch.setattr(NcclMachine, "of", classmethod(lambda cls, cards: machine))
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        on(well(2))
        return machine

    def test_the_best_is_printed_as_export_lines_and_saved(
        self, machine: NcclMachine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        def runner(facts: Facts, sizes: object):
            return lambda settings: {1 << 20: 50e-6 / (1.3 if settings.get("NCCL_PROTO") == "LL128" else 1)}

        monkeypatch.setattr("manycard.cli.doctor.trial_runner", runner)
        assert main(["doctor", "--deep"]) == 0
        out = capsys.readouterr().out
        assert "\nexport NCCL_PROTO=LL128\n" in out
        assert "Best: 1.30 times as fast as the default" in out
        settings = load_settings(machine)
        assert settings is not None
        assert settings.variables["NCCL_PROTO"] == "LL128"
        assert settings.gain == pytest.approx(1.3)
        assert str(settings_file(machine)) in out

    def test_where_nothing_is_faster_the_default_is_saved(
        self, machine: NcclMachine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        monkeypatch.setattr("manycard.cli.doctor.trial_runner", lambda facts, sizes: lambda settings: {1 << 20: 5e-5})
        assert main(["doctor", "--deep", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["machine"]["nccl_sweep"]["best"] == {}
        settings = load_settings(machine)
        assert settings is not None
        assert settings.variables == {}

    def test_a_default_that_fails_is_said(
        self, machine: NcclMachine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        def fails(settings: object) -> None:
            raise TrialFailed("system error")

        monkeypatch.setattr("manycard.cli.doctor.trial_runner", lambda facts, sizes: fails)
        assert main(["doctor", "--deep"]) == 0
        assert "NCCL's default fails: system error" in capsys.readouterr().out
        assert load_settings(machine) is None


class TestSelect:
    def select(self, facts: Facts, **environment: str) -> Selection:
        return name_for_cuda(facts.choice, facts.machine, facts.visible, environment)

    def test_numbers_of_equal_cards(self):
        busy = [card(0), card(1, free=100, processes=[stranger()]), card(2)]
        selection = self.select(made_facts(busy, "auto"))
        assert selection.value == "0,2"
        assert "cuda:1 (NVIDIA H200) is left out: in use by pid 4242" in selection.said

    def test_numbers_are_the_driver_s_not_those_of_what_is_visible(self):
        facts = made_facts([card(index) for index in range(4)], "1,", environment={"CUDA_VISIBLE_DEVICES": "2,3"})
        assert self.select(facts).value == "3"

    def test_unequal_cards_go_by_uuid_unless_the_order_is_set(self):
        facts = made_facts([card(0, "T4"), card(1)], "auto")
        assert self.select(facts).value == facts.machine.cards[1].uuid
        assert self.select(facts, CUDA_DEVICE_ORDER="PCI_BUS_ID").value == "1"

    def test_slices_go_by_uuid(self):
        assert self.select(made_facts([sliced(0, 2)])).value.startswith("MIG-")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card for torch here")
    def test_without_gpus_the_line_hides_all_and_the_rest_is_said(self, capsys: pytest.CaptureFixture[str]):
        assert main(["doctor", "--select"]) == 0
        out, err = capsys.readouterr()
        assert out == "CUDA_VISIBLE_DEVICES=\n"
        assert "There is no GPU to select" in err
        assert main(["doctor", "--select", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["CUDA_VISIBLE_DEVICES"] == ""
        assert main(["doctor", "--select", "--cards", "0,1"]) == 2


def test_a_cuda_that_hangs_is_found_and_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    machine = replace(read_machine(), cards=(card(0), card(1)), driver="580.95.05", driver_cuda=(13, 0), why_none="")
    monkeypatch.setattr("manycard.cli.doctor.read_machine", lambda: machine)
    monkeypatch.setattr("manycard.diagnosis.facts.read_machine", lambda: machine)
    monkeypatch.setattr("manycard.cli.doctor.cuda_hangs_at", lambda environment: "asking CUDA for its cards")
    for name in ("is_available", "device_count", "get_device_properties", "get_arch_list"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *_: pytest.fail("CUDA was asked"))
    assert main(["doctor", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    errors = [finding["cause"] for finding in document["findings"] if finding["severity"] == "error"]
    assert errors == ["asking CUDA for its cards hangs on these cards, and so will training on them"]
    assert [row["name"] for row in document["cards"]] == ["cpu:0", "card 0", "card 1"]


@pytest.mark.parametrize("error", ["the library is broken", "\x1b[31m"])
def test_a_machine_whose_nvml_does_not_start_is_still_described(
    error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    import pynvml

    def fail() -> None:
        raise OSError(error)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    main(["doctor", "--quick"])
    out, err = capsys.readouterr()
    assert "management library did not start" in " ".join(out.split())
    assert "Traceback" not in out + err


def test_a_container_with_a_small_shared_memory_and_no_cards(on, capsys: pytest.CaptureFixture[str]):
    small = replace(HOST, shm_total=64 << 20, shm_free=64 << 20, cores=4)
    on(made_facts([], host=small, torch=replace(TORCH, threads=4)))
    assert main(["doctor"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "64 MiB of 64 MiB are free" in out
    assert "--shm-size" in out
