"""The corpus is whole, knows nothing of manycard, and every script of it gives one log on one card, run after run."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .corpus import CORPUS, FOLDER, Entry
from .logs import numbers_in, same_log

WORKER = Path(__file__).with_name("plain_worker.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

Run = Callable[[Path], dict[str, Any]]

every_script = pytest.mark.parametrize("entry", CORPUS, ids=lambda entry: entry.name)


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a script as ``python SCRIPT`` does; gives its status and output."""
    worker = subprocess.Popen(
        [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert worker.stdin is not None
    assert worker.stdout is not None

    def run(script: Path) -> dict[str, Any]:
        print(script, file=worker.stdin, flush=True)
        return json.loads(worker.stdout.readline())

    try:
        yield run
    finally:
        worker.stdin.close()
        worker.stdout.close()
        worker.wait(timeout=10)


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
def test_a_script_prints_the_same_log_twice(run: Run, entry: Entry) -> None:
    first, second = run(entry.path), run(entry.path)
    assert first["status"] == 0, first["stderr"]
    assert second["status"] == 0, second["stderr"]
    assert first["stdout"] == second["stdout"]
    assert len(numbers_in(first["stdout"])) >= 3
    assert re.search(r"\bnan\b|\binf\b", first["stdout"], re.IGNORECASE) is None


@pytest.mark.parametrize("name", ["sys_exit", "whole_model_saved"])
def test_the_worker_runs_a_script_as_python_does(run: Run, name: str) -> None:
    entry = next(entry for entry in CORPUS if entry.name == name)
    done = subprocess.run(
        [sys.executable, str(entry.path)], capture_output=True, text=True, env=ENVIRONMENT, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert same_log(done.stdout, run(entry.path)["stdout"], tolerance=0.0) is None


@pytest.mark.parametrize(
    ("body", "status"), [("raise SystemExit(3)", 3), ("raise ValueError('no')", 1), ("raise SystemExit('no')", 1)]
)
def test_the_worker_sees_a_script_fail(run: Run, tmp_path: Path, body: str, status: int) -> None:
    script = tmp_path / "failing.py"
    script.write_text(f"print('before')\n{body}\n")
    result = run(script)
    assert (result["status"], result["stdout"]) == (status, "before\n")
    assert ("no" in result["stderr"]) == (status == 1)
