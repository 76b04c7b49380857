from __future__ import annotations

import pytest

from manycard.cli import app as app_module
from manycard.cli.app import main
from manycard.errors import CheckpointError, RankFailed, SettingError


def test_without_a_command_it_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for command in ("doctor", "run", "bench"):
        assert command in out


@pytest.mark.parametrize("command", ["doctor", "run", "bench"])
def test_every_command_has_help_and_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert "--json" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("manycard ")


@pytest.mark.parametrize(
    "words", [["--nonsense"], ["nonsense"], ["run"], ["run", "--nonsense", "train.py"], ["run", "--cards"]]
)
def test_wrong_usage_is_one_line_and_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("manycard: ")
    assert err.count("\n") == 1
    assert "--help" in err


@pytest.mark.parametrize(
    ("error", "status", "shown"),
    [
        (SettingError("--cards", "x", "it is odd"), 2, "manycard: --cards='x': it is odd.\n"),
        (CheckpointError("the disk is full"), 1, "manycard: the disk is full.\n"),
        (
            RankFailed(1, 1, "Traceback ...\nValueError: boom\n"),
            1,
            "rank 1:\nTraceback ...\nValueError: boom\n"
            "manycard: rank 1 exited with status 1; the other ranks were stopped.\n",
        ),
        (RankFailed(0, 3, ""), 3, "manycard: rank 0 exited with status 3; the other ranks were stopped.\n"),
        (RankFailed(0, -9, ""), 1, "manycard: rank 0 was ended by signal 9; the other ranks were stopped.\n"),
        (KeyboardInterrupt(), 130, "manycard: interrupted\n"),
    ],
)
def test_errors_have_their_status_and_no_traceback_of_ours(
    error: BaseException, status: int, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "app", _app_that_raises(error))
    assert main(["work"]) == status
    assert capsys.readouterr().err.lstrip("\n") == shown


def test_a_fault_of_our_own_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "app", _app_that_raises(AssertionError("impossible")))
    with pytest.raises(AssertionError, match="impossible"):
        main(["work"])


def _app_that_raises(error: BaseException) -> object:
    app = app_module.typer.Typer()

    @app.command()
    def work() -> None:
        raise error

    @app.command()
    def other() -> None:
        """A second command, so that the first keeps its name."""

    return app
