"""Settings saved for a machine reach its runs before NCCL starts, and never over the user's own word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from manycard.cards import Card
from manycard.cards import nccl_settings as module
from manycard.cards.nccl_settings import (
    NcclMachine,
    NcclSettings,
    apply_saved,
    check_nccl,
    load_settings,
    save_settings,
    settings_file,
    take_back,
)
from manycard.errors import SettingError

MACHINE = NcclMachine(("NVIDIA H200", "NVIDIA H200"), "580.95.05", "2.30.7")
CARDS = [Card(place, torch.device("cuda", place), "NVIDIA H200", f"GPU-{place}") for place in range(2)]
BEST = NcclSettings({"NCCL_ALGO": "Ring", "NCCL_MIN_NCHANNELS": "16"}, 1.12, (1 << 20,), "2026-01-31")


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A process's variables whose settings are in a folder of the test; its cards are `MACHINE`."""
    monkeypatch.setattr(NcclMachine, "of", classmethod(lambda cls, cards: MACHINE if len(cards) == 2 else None))
    monkeypatch.setattr(module, "_SAID", set())
    return {"XDG_CONFIG_HOME": str(tmp_path)}


def test_saved_settings_are_applied_and_said(environment: dict[str, str], capsys: pytest.CaptureFixture[str]):
    save_settings(MACHINE, BEST, settings_file(MACHINE, environment))
    assert apply_saved(CARDS, environment) == BEST.variables
    assert environment["NCCL_ALGO"] == "Ring"
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "NCCL_ALGO=Ring NCCL_MIN_NCHANNELS=16 (1.12x the default, measured 2026-01-31" in err
    assert apply_saved(CARDS, environment) == {}
    assert capsys.readouterr().err == ""


def test_the_user_s_variable_stays(environment: dict[str, str], capsys: pytest.CaptureFixture[str]):
    save_settings(MACHINE, BEST, settings_file(MACHINE, environment))
    environment["NCCL_ALGO"] = "Tree"
    assert apply_saved(CARDS, environment) == {"NCCL_MIN_NCHANNELS": "16"}
    assert environment["NCCL_ALGO"] == "Tree"
    assert "NCCL_ALGO=Tree stays as you set it" in capsys.readouterr().err


def test_what_was_applied_can_be_taken_back(environment: dict[str, str]):
    save_settings(MACHINE, BEST, settings_file(MACHINE, environment))
    environment["NCCL_ALGO"] = "Tree"
    before = dict(environment)
    apply_saved(CARDS, environment)
    take_back(environment)
    assert environment == before
    take_back(environment)
    assert environment == before


def test_nothing_saved_and_another_machine_change_nothing(environment: dict[str, str]):
    before = dict(environment)
    assert apply_saved(CARDS, environment) == {}
    save_settings(MACHINE, BEST, settings_file(MACHINE, environment))
    assert apply_saved(CARDS[:1], environment) == {}
    assert environment == before


def test_a_default_that_was_best_sets_nothing(environment: dict[str, str], capsys: pytest.CaptureFixture[str]):
    save_settings(MACHINE, NcclSettings({}, 1.0), settings_file(MACHINE, environment))
    assert apply_saved(CARDS, environment) == {}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"variables": {"PATH": "/x"}}', '{"variables": {"NCCL_ALGO": 1}}'])
def test_a_file_that_holds_something_else_is_said_and_left_out(
    environment: dict[str, str], text: str, capsys: pytest.CaptureFixture[str]
):
    file = settings_file(MACHINE, environment)
    file.parent.mkdir(parents=True)
    file.write_text(text)
    before = dict(environment)
    assert apply_saved(CARDS, environment) == {}
    assert environment == before
    assert "left out" in capsys.readouterr().err


def test_a_silent_rank_says_nothing(environment: dict[str, str], capsys: pytest.CaptureFixture[str]):
    save_settings(MACHINE, BEST, settings_file(MACHINE, environment))
    assert apply_saved(CARDS, environment, speaks=False) == BEST.variables
    assert capsys.readouterr().err == ""


def test_saved_and_loaded_are_equal(tmp_path: Path):
    file = save_settings(MACHINE, BEST, tmp_path / "a" / "b.json")
    assert load_settings(MACHINE, file) == BEST
    assert json.loads(file.read_text())["machine"]["driver"] == "580.95.05"
    assert [path.name for path in file.parent.iterdir()] == ["b.json"]
    assert load_settings(MACHINE, tmp_path / "none.json") is None


def test_machines_differ_by_models_number_driver_and_nccl():
    others = [
        NcclMachine(("NVIDIA H200",) * 4, "580.95.05", "2.30.7"),
        NcclMachine(("NVIDIA H100",) * 2, "580.95.05", "2.30.7"),
        NcclMachine(("NVIDIA H200",) * 2, "590.1", "2.30.7"),
        NcclMachine(("NVIDIA H200",) * 2, "580.95.05", "2.31.0"),
    ]
    assert len({machine.key for machine in [MACHINE, *others]}) == 5


def test_simulated_cards_have_no_machine():
    simulated = [Card(place, torch.device("cpu")) for place in range(2)]
    assert NcclMachine.of(simulated) is None
    assert apply_saved(simulated, {}) == {}


def test_another_word_is_refused():
    with pytest.raises(SettingError, match=r"nccl='best': it is neither saved nor default"):
        check_nccl("best")
