"""Scripts of the corpus with one process a card, proved to be the same training, or told apart with the cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from manycard.launch import Script
from manycard.script.verify.comparing import Report
from manycard.script.verify.verifying import VerifySettings, verify

from .corpus import FOLDER

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where scripts write."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def _verify(name: str, *, sync_batchnorm: bool = False) -> Report:
    script = Script(str(FOLDER / f"{name}.py"))
    return verify(VerifySettings(script, 4, "cpu:2", "ddp", sync_batchnorm))


def _line_of(name: str, words: str) -> int:
    """The number of the first line of a script that has these words."""
    lines = (FOLDER / f"{name}.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if words in line)


@pytest.mark.parametrize("name", ["gpt_tied_weights", "gan_two_optimizers", "matrix_factorization"])
def test_the_same_training(name: str) -> None:
    report = _verify(name)
    assert report.same, report.causes
    assert len(report.steps) == 4
    assert report.gradient.value > 0
    assert sum(int(str(module["spread"])) for module in report.spread) > 0
    assert report.causes == ()


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("transformer_dropout", "forward draws at random (dropout, noise), and each card draws its own"),
        ("batchnorm_cnn", "BatchNorm takes its statistics from each card's part of the batch"),
    ],
)
def test_a_difference_and_its_cause(name: str, cause: str) -> None:
    report = _verify(name)
    assert not report.same
    assert report.first is not None
    assert report.first.what == "loss"
    assert report.first.where == f"{FOLDER / name}.py:{_line_of(name, '.backward()')}"
    assert [found.cause for found in report.causes] == [cause]


def test_synchronised_batchnorm_is_the_same_training() -> None:
    report = _verify("batchnorm_cnn", sync_batchnorm=True)
    assert report.same, report.causes
