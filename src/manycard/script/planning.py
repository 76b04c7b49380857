"""Planning a script: it runs to its first steps in a process of its own, is measured there on copies, and ends.

Behaviour:
    * What a script has done by its first steps (files written, a download) stays done. What it prints is hidden, and
      its end is shown if it fails before a step was seen.
    * A notebook's code cells run as a script, without lines that are IPython's own (``%``, ``!``).
    * A script of ranks is run as the only rank of a group of one.
    * Whatever ends the caller ends the script's process and all that it started.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from manycard.cards import choose_cards
from manycard.errors import ManycardError, SettingError
from manycard.launch import Script, cards_setting, end_family
from manycard.planner import Candidate, Facts, Measured, Plan, make_plan
from manycard.planner.cache import plan_key
from manycard.script.written_for_ranks import written_for_ranks
from manycard.version import __version__

__all__ = ["ScriptPlanRequest", "notebook_code", "plan_script", "script_key"]

_PATIENCE = 900.0
"""Seconds without any word of a script after which it is ended: it may load for minutes, and a broken link hangs."""
_TAIL = 3_000
"""Characters of a script's output that are shown when it fails."""


@dataclass(frozen=True)
class ScriptPlanRequest:
    """What is to be planned."""

    script: Script
    cards: str = "all"
    precision: str | None = None
    trials: int = 5
    compile: bool = False
    written: str | None = None
    """How the script is written, where the user says so."""


def plan_script(
    request: ScriptPlanRequest,
    cards_model: str | None = None,
    nodes: int = 1,
    network: float = 50.0,
    say: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Plan a script.

    Args:
        cards_model: plan for cards that aren't here, by their data sheets.

    Raises:
        ManycardError: no training step was seen, or one step on one card fails.
        SettingError: `cards_model` names no known cards.
    """
    cards = choose_cards("cpu:1" if cards_model else request.cards).cards
    with tempfile.TemporaryDirectory(prefix="manycard-plan-") as name:
        folder = Path(name)
        script, written = _runnable(request, folder)
        orders = {
            "argv": script.argv,
            "place": os.path.dirname(os.path.realpath(request.script.name)),
            "cards": cards_setting(cards),
            "precision": request.precision,
            "trials": request.trials,
            "compile": request.compile,
            "written": request.written or written,
            "cards_model": cards_model,
            "nodes": nodes,
            "network": network,
        }
        (folder / "orders.json").write_text(json.dumps(orders), encoding="utf-8")
        say(f"running the first steps of {request.script.name}")
        code, said = _run(folder, _environment(orders), say)
        result = folder / "result.json"
        if not result.exists():
            ended = f"{request.script.name} ended (status {code}) before a training step was seen"
            wrote = f"it wrote: {said or 'nothing'}"
            raise ManycardError(f"{ended}\n{wrote}", fix="see that it trains under python first")
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    if found["error"]:
        raise ManycardError(f"{request.script.name} couldn't be measured: {found['error']}")
    return _plan(found)


def script_key(request: ScriptPlanRequest) -> str | None:
    """What a script's plan depends on; None where its text can't be read (a module)."""
    try:
        text = Path(request.script.name).read_bytes()
    except OSError:
        return None
    cards = choose_cards(request.cards).cards
    return plan_key(
        {
            "script": os.path.realpath(request.script.name),
            "text": text.hex(),
            "arguments": request.script.arguments,
            "cards": [(card.name, card.model, card.uuid) for card in cards],
            "precision": request.precision,
            "versions": (__version__, torch.__version__, torch.version.cuda),
        }
    )


def notebook_code(path: Path) -> str:
    """The code cells of a notebook as one script, without IPython's own lines.

    Raises:
        SettingError: it is no notebook.
    """
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        parts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError("SCRIPT", str(path), f"it is no notebook ({error})", fix="give a .py or .ipynb") from error
    lines = [line for part in parts if not part.startswith("%%") for line in [*part.splitlines(), ""]]
    return "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in lines) + "\n"


def _runnable(request: ScriptPlanRequest, folder: Path) -> tuple[Script, str | None]:
    """A script that Python runs, and how it is written where its file tells."""
    script = request.script
    if script.name.endswith(".ipynb"):
        path = folder / "notebook.py"
        path.write_text(notebook_code(Path(script.name)), encoding="utf-8")
        return Script(str(path), script.arguments), "notebook"
    return script, "ranks" if _has_ranks(script) else None


def _has_ranks(script: Script) -> bool:
    """Whether it deals with ranks by itself, and not through manycard."""
    if not written_for_ranks(script) or script.is_module:
        return False
    text = Path(script.name).read_text(encoding="utf-8", errors="replace")
    return "manycard" not in text


def _environment(orders: dict[str, Any]) -> dict[str, str]:
    environment = {**os.environ, "MANYCARD_CARDS": orders["cards"], "MANYCARD_STRATEGY": "dp"}
    if orders["precision"]:
        environment["MANYCARD_PRECISION"] = orders["precision"]
    if orders["written"] == "ranks":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return environment


def _run(folder: Path, environment: dict[str, str], say: Callable[[str], None]) -> tuple[int, str]:
    """Run the worker to its end; its status and the end of what it wrote."""
    log_path, progress, told = folder / "log", folder / "progress", 0
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "manycard.script.planning_worker", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
        try:
            last = time.monotonic()
            while process.poll() is None and time.monotonic() - last < _PATIENCE:
                lines = progress.read_text(encoding="utf-8").splitlines() if progress.exists() else []
                for line in lines[told:]:
                    say(line)
                    last = time.monotonic()
                told = len(lines)
                time.sleep(0.1)
        finally:
            end_family(process)
            # Its loaders' workers are no longer its children once it is gone.
            _end_session(process.pid)
    return process.returncode, log_path.read_text(encoding="utf-8", errors="replace")[-_TAIL:].rstrip()


def _end_session(leader: int) -> None:
    import contextlib
    import signal

    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _plan(found: dict[str, Any]) -> Plan:
    measured = {}
    for fields, result in found["measured"]:
        measured[Candidate(**{**fields, "weights": tuple(fields["weights"])})] = Measured(**result)
    return make_plan(Facts.from_document(found["facts"]), measured)


def result_document(facts: Facts, measured: dict[Candidate, Measured]) -> dict[str, Any]:
    """What a worker leaves."""
    pairs = [[asdict(candidate), asdict(result)] for candidate, result in measured.items()]
    return {"facts": facts.to_document(), "measured": pairs, "error": ""}
