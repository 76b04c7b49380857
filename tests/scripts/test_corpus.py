"""The corpus is whole, knows nothing of manycard, and every script of it runs and prints a log of numbers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .corpus import CORPUS, FOLDER, Entry
from .logs import numbers_in, same_log
from .runs import ENVIRONMENT, Job, Runs

every_script = pytest.mark.parametrize("entry", CORPUS, ids=lambda entry: entry.name)


def test_every_script_is_listed_once() -> None:
    names = [entry.name for entry in CORPUS]
    assert sorted(names) == sorted(path.stem for path in FOLDER.glob("*.py"))
    assert len(set(names)) == len(names)


def test_nothing_else_is_in_the_folder() -> None:
    others = [path.name for path in FOLDER.iterdir() if path.suffix != ".py" and path.name != "__pycache__"]
    assert others == []


def test_every_expectation_has_scripts() -> None:
    found = {entry.expect for entry in CORPUS}
    assert found == {"same", "same_with_sync_batchnorm", "one_card", "differs"}


@every_script
def test_a_script_says_what_it_stands_for_and_knows_nothing_of_manycard(entry: Entry) -> None:
    source = entry.path.read_text()
    docstring = ast.get_docstring(ast.parse(source))
    assert docstring is not None
    assert len(docstring.splitlines()) == 1
    assert re.search("manycard", source, re.IGNORECASE) is None


@every_script
def test_a_script_prints_a_log(runs: Runs, entry: Entry) -> None:
    first = runs.result(Job(entry.path))
    assert first["status"] == 0, first["stderr"]
    assert len(numbers_in(first["stdout"])) >= 3
    assert re.search(r"\bnan\b|\binf\b", first["stdout"], re.IGNORECASE) is None


@pytest.mark.parametrize("name", ["sys_exit", "whole_model_saved"])
def test_the_worker_runs_a_script_as_python_does(runs: Runs, name: str) -> None:
    entry = next(entry for entry in CORPUS if entry.name == name)
    done = subprocess.run(
        [sys.executable, str(entry.path)], capture_output=True, text=True, env=ENVIRONMENT, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert same_log(done.stdout, runs.result(Job(entry.path))["stdout"], tolerance=0.0) is None


@pytest.mark.parametrize(
    ("body", "status"), [("raise SystemExit(3)", 3), ("raise ValueError('no')", 1), ("raise SystemExit('no')", 1)]
)
def test_the_worker_sees_a_script_fail(runs: Runs, tmp_path: Path, body: str, status: int) -> None:
    script = tmp_path / "failing.py"
    script.write_text(f"print('before')\n{body}\n")
    result = runs.result(Job(script))
    assert (result["status"], result["stdout"]) == (status, "before\n")
    assert ("no" in result["stderr"]) == (status == 1)
