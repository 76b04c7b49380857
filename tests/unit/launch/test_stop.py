"""Ending a run from outside: Ctrl-C, SIGTERM, and a launcher that is killed outright."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from manycard.launch.watch import GRACE
from tests.unit.launch.processes import Playground, wait_until

LAUNCH = """
import sys, torch
from manycard.cards.card import Card
from manycard.launch import launch_script
launch_script(sys.argv[1:], [Card(i, torch.device("cpu")) for i in range(2)])
"""

HANG = """
    import os, pathlib, signal, subprocess, sys, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], stderr=subprocess.DEVNULL)
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pathlib.Path(f"ready{dist.get_rank()}").touch()
    if dist.get_rank() == 0:
        dist.recv(torch.ones(1), src=1)  # which never comes
    import time
    time.sleep(300)
"""


@contextmanager
def _hanging(place: Playground, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A launcher whose two ranks hang, one of them in a collective, each with a child of its own."""
    script = place.write("train.py", HANG)
    with place.start("-c", LAUNCH, script, *words) as launcher:
        try:
            assert wait_until(lambda: len(list(Path().glob("ready*"))) == 2, 80)
            yield launcher
        finally:
            launcher.kill()
            for process in place.left():
                process.kill()


@pytest.mark.parametrize("words", [(), ("stubborn",)])
def test_ctrl_c_leaves_nothing(place: Playground, words: tuple[str, ...]) -> None:
    with _hanging(place, *words) as launcher:
        launcher.send_signal(signal.SIGINT)
        _, err = launcher.communicate(timeout=30)
        assert launcher.returncode != 0
        assert err.count("Traceback") == 1, err  # the launcher's own KeyboardInterrupt
        assert "KeyboardInterrupt" in err.splitlines()[-1]
        assert place.nothing_left()


def test_a_script_can_save_on_ctrl_c(place: Playground) -> None:
    script = place.write(
        "train.py",
        """
        import os, pathlib, time
        pathlib.Path(f"ready{os.environ['RANK']}").touch()
        try:
            time.sleep(300)
        except KeyboardInterrupt:
            if os.environ["RANK"] == "0":
                time.sleep(1)
                pathlib.Path("saved").touch()
        """,
    )
    with place.start("-c", LAUNCH, script) as launcher:
        assert wait_until(lambda: len(list(Path().glob("ready*"))) == 2, 80)
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=30)
    assert Path("saved").exists()
    assert place.nothing_left()


def test_a_second_ctrl_c_does_not_wait(place: Playground) -> None:
    with _hanging(place) as launcher:
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.5)  # two signals at once would arrive as one
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=GRACE - 1.5)
        assert place.nothing_left()


def test_sigterm_leaves_nothing_and_is_what_ended_the_launcher(place: Playground) -> None:
    with _hanging(place) as launcher:
        launcher.terminate()
        launcher.communicate(timeout=30)
        assert launcher.returncode == -signal.SIGTERM
        assert place.nothing_left()


def test_a_launcher_killed_outright_leaves_nothing(place: Playground) -> None:
    with _hanging(place, "stubborn") as launcher:
        launcher.kill()
        launcher.wait()
        assert place.nothing_left()


def test_a_launcher_killed_while_ranks_start_leaves_nothing(place: Playground) -> None:
    script = place.write("train.py", HANG)
    with place.start("-c", LAUNCH, script) as launcher:
        children = psutil.Process(launcher.pid).children
        assert wait_until(lambda: any("rank.py" in " ".join(c.cmdline()) for c in children()), 80)
        launcher.kill()
    assert place.nothing_left(10)
