"""`Parallel(nccl=...)` and ``manycard run --nccl``: saved settings are there before NCCL starts, or are left alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from manycard import Parallel
from manycard.cards import nccl_settings as module
from manycard.cards.nccl_settings import NcclMachine, NcclSettings, save_settings, settings_file
from manycard.cli import main
from manycard.errors import SettingError

MACHINE = NcclMachine(("simulated",) * 2, "1", "2")
SCRIPT = """
import os, sys
import manycard as mc
parallel = mc.Parallel(cards="cpu:2"{settings})
print("ALGO", os.environ.get("NCCL_ALGO"))
parallel.close()
"""


@pytest.fixture(autouse=True)
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two simulated cards taken for GPUs that settings were saved for."""
    monkeypatch.setattr(NcclMachine, "of", classmethod(lambda cls, cards: MACHINE))
    monkeypatch.setattr(module, "_SAID", set())
    for name in ("NCCL_ALGO", "MANYCARD_NCCL", "MANYCARD_NCCL_APPLIED", "MANYCARD_CARDS"):
        monkeypatch.setenv(name, "")  # so that what a test sets is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    save_settings(MACHINE, NcclSettings({"NCCL_ALGO": "Ring"}, 1.2, (), "2026-01-31"), settings_file(MACHINE))


def test_they_are_applied_and_said(capsys: pytest.CaptureFixture[str]):
    Parallel(cards="cpu:2").close()
    assert os.environ["NCCL_ALGO"] == "Ring"
    assert "NCCL settings saved for this machine: NCCL_ALGO=Ring" in capsys.readouterr().err


def test_default_leaves_them_out(capsys: pytest.CaptureFixture[str]):
    Parallel(cards="cpu:2", nccl="default").close()
    assert "NCCL_ALGO" not in os.environ
    assert "NCCL" not in capsys.readouterr().err


def test_another_word_is_refused():
    with pytest.raises(SettingError, match="nccl='fast'"):
        Parallel(cards="cpu:2", nccl="fast")


@pytest.mark.parametrize(
    ("options", "settings", "printed"),
    [
        ([], "", "ALGO Ring"),
        (["--nccl", "saved"], "", "ALGO Ring"),
        (["--nccl", "default"], "", "ALGO None"),
        ([], ', nccl="default"', "ALGO None"),
        (["--cards", "cpu:2"], ', nccl="default"', "ALGO None"),
        (["--nccl", "saved"], ', nccl="default"', "ALGO Ring"),
    ],
    ids=str,
)
def test_run_s_word_wins_over_the_script_s(
    options: list[str], settings: str, printed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(settings=settings))
    assert main(["run", *options, str(script)]) == 0
    assert printed in capsys.readouterr().out


def test_run_refuses_another_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script = tmp_path / "script.py"
    script.write_text("")
    assert main(["run", "--nccl", "fast", str(script)]) == 2
    assert "--nccl='fast': it is neither saved nor default" in capsys.readouterr().err
