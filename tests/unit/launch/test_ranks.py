"""Real ranks on simulated cards, started from this process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import manycard
from manycard.cards.card import Card
from manycard.errors import RankFailed, SettingError
from manycard.launch import cards_setting, launch_script
from manycard.launch.watch import GRACE
from tests.unit.launch.processes import Playground

SECONDS_TO_END = GRACE + 40.0
"""From the start of a run that fails at once to its end: starting takes some seconds here, and many where cores are
busy. Ranks that nobody ends would stay for minutes."""


def _cards(number: int) -> list[Card]:
    return [Card(i, torch.device("cpu")) for i in range(number)]


def _failure(place: Playground, *argv: str, ranks: int = 2) -> RankFailed:
    """Run a script that fails; everything must have ended soon after."""
    start = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        launch_script(argv, _cards(ranks))
    assert time.monotonic() - start < SECONDS_TO_END
    assert not place.left()
    return caught.value


def test_a_rank_ends_as_python_does(place: Playground) -> None:
    script = place.write(
        "ends.py",
        """
        import atexit, os, sys, threading, time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        notes = open(f"notes{rank}.txt", "w")
        notes.write("not flushed ")

        def later():
            time.sleep(0.5)
            notes.write("by a thread ")

        threading.Thread(target=later).start()
        atexit.register(notes.write, "at exit")

        class Held:
            def __del__(self):
                with open(f"deleted{rank}.txt", "w") as file:
                    file.write(os.path.basename(__file__))

        held = Held()
        dist.all_reduce(torch.ones(2))
        """,
    )
    launch_script([script], _cards(2))
    for rank in range(2):
        assert Path(f"notes{rank}.txt").read_text() == "not flushed by a thread at exit"
        assert Path(f"deleted{rank}.txt").read_text() == "ends.py"


def _python_path() -> list[str]:
    """Where Python finds modules, without the script's folder; a rank appends manycard's own where it isn't there."""
    shown = "import json, sys; print(json.dumps(sys.path[1:]))"
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout)
    own = str(Path(manycard.__file__).parents[1])
    return found if own in found else [*found, own]


def test_ranks_form_a_group_and_see_what_python_shows(
    place: Playground, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    monkeypatch.delenv("OMP_NUM_THREADS")
    script = place.write(
        "sub/train.py",
        """
        import json, os, sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MANYCARD_CARDS", "MANYCARD_STRATEGY",
                 "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
        seen = {name: os.environ.get(name) for name in names}
        seen |= {"argv": sys.argv, "path": sys.path, "name": __name__, "total": total.item(), "cwd": os.getcwd()}
        json.dump(seen, open(f"seen{dist.get_rank()}.json", "w"))
        print("rank", dist.get_rank())
        print("warning", dist.get_rank(), file=sys.stderr)
        dist.destroy_process_group()
        """,
    )
    before = dict(os.environ)
    launch_script([script, "--cost", "$$5", "${local_rank}"], _cards(2), {"MANYCARD_STRATEGY": "ddp"})
    assert dict(os.environ) == before
    for rank in range(2):
        seen = json.loads(Path(f"seen{rank}.json").read_text())
        assert seen == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MANYCARD_CARDS": "cpu:2",
            "MANYCARD_STRATEGY": "ddp",
            "CUDA_VISIBLE_DEVICES": "1,0",
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2)),
            "argv": [script, "--cost", "$$5", "${local_rank}"],
            "path": [str(place.folder / "sub"), *_python_path()],
            "name": "__main__",
            "total": 3.0,
            "cwd": str(place.folder),
        }
    out, err = capfd.readouterr()
    assert out == "rank 0\n"
    assert "OMP_NUM_THREADS" in err
    assert [line for line in err.splitlines() if not line.startswith("manycard:")] == ["warning 0"]
    assert "by itself" not in err
    assert place.nothing_left()


def test_the_first_failure_is_shown_and_the_others_do_not_hang(
    place: Playground, capfd: pytest.CaptureFixture[str]
) -> None:
    script = place.write(
        "train.py",
        """\
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        def train():
            if dist.get_rank() == 1:
                raise ValueError("a bad label: -1")
            dist.all_reduce(torch.ones(1))
        train()
        """,
    )
    failed = _failure(place, script, ranks=3)
    assert (failed.rank, failed.exit_code) == (1, 1)
    lines = failed.trace.splitlines()
    assert lines[:2] == ["Traceback (most recent call last):", f'  File "{script}", line 7, in <module>']
    assert lines[-1] == "ValueError: a bad label: -1"
    assert "manycard" not in failed.trace
    out, err = capfd.readouterr()
    assert out == ""
    assert all(line.startswith("manycard:") for line in err.splitlines()), err
    assert place.nothing_left()


def test_a_killed_rank_is_named_though_the_others_saw_closed_connections(place: Playground) -> None:
    script = place.write(
        "train.py",
        """
        import os, signal, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
        """,
    )
    failed = _failure(place, script)
    assert (failed.rank, failed.exit_code) == (1, -signal.SIGKILL)
    assert "memory" in str(failed)


def test_ranks_that_ignore_sigterm_are_killed_after_the_grace(place: Playground) -> None:
    script = place.write(
        "train.py",
        """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.environ["RANK"] == "1":
            print("the last words", file=sys.stderr, flush=True)
            os._exit(7)
        time.sleep(300)
        """,
    )
    failed = _failure(place, script)
    assert (failed.rank, failed.exit_code) == (1, 7)
    assert "the last words" in failed.trace
    kept = list(place.temporary.glob("manycard-*/*/*"))
    assert [file.read_text() for file in kept] == ["the last words\n"]
    assert str(kept[0].parents[1]) in str(failed)


def test_a_rank_that_failed_and_cannot_exit_ends_too_and_so_does_what_ranks_started(place: Playground) -> None:
    script = place.write(
        "train.py",
        """
        import os, subprocess, sys, threading, time
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        if os.environ["RANK"] == "0":
            threading.Thread(target=time.sleep, args=(300,)).start()
            raise KeyError("label")
        time.sleep(300)
        """,
    )
    failed = _failure(place, script)
    assert (failed.rank, failed.exit_code) == (0, 1)
    assert failed.trace.splitlines()[-1] == "KeyError: 'label'"
    assert place.nothing_left()


def test_the_scripts_own_exit_status_is_kept(place: Playground) -> None:
    script = place.write("train.py", "import sys, os\nsys.exit(3 if os.environ['RANK'] == '1' else 0)\n")
    failed = _failure(place, script)
    assert (failed.rank, failed.exit_code, failed.trace) == (1, 3, "")


def test_ranks_that_never_join_are_said_to_work_alone(place: Playground, capfd: pytest.CaptureFixture[str]) -> None:
    launch_script([place.write("train.py", "print('trained')\n")], _cards(2))
    out, err = capfd.readouterr()
    assert out == "trained\n"
    assert (
        err
        == "manycard: each of the 2 ranks ran the whole script by itself: it made no mc.Parallel and no process group\n"
    )


def test_a_module_with_relative_imports_whose_parser_knows_local_rank(place: Playground) -> None:
    place.write("project/__init__.py", "")
    place.write("project/part.py", "VALUE = 7\n")
    place.write(
        "project/train.py",
        """
        import argparse, pathlib, sys
        from .part import VALUE
        parser = argparse.ArgumentParser()
        parser.add_argument("--local_rank", type=int, default=-1)
        parser.add_argument("--lr", type=float)
        args = parser.parse_args()
        pathlib.Path(f"seen{args.local_rank}").write_text(f"{VALUE} {args.lr} {len(sys.argv)}")
        """,
    )
    launch_script(["-m", "project.train", "--lr", "0.5"], _cards(2))
    assert {file.name: file.read_text() for file in Path().glob("seen*")} == dict.fromkeys(
        ("seen0", "seen1"), "7 0.5 3"
    )


def test_several_runs_at_once_do_not_share_a_port(place: Playground) -> None:
    script = place.write(
        "train.py",
        """
        import os, pathlib, sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([float(sys.argv[1])])
        dist.all_reduce(total)
        pathlib.Path(f"total{sys.argv[1]}-{dist.get_rank()}").write_text(f"{total.item():g}")
        dist.destroy_process_group()
        """,
    )
    threads = [threading.Thread(target=launch_script, args=([script, str(number)], _cards(2))) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    totals = {file.name: file.read_text() for file in Path().glob("total*")}
    assert totals == {f"total{number}-{rank}": str(2 * number) for number in range(3) for rank in range(2)}


def test_what_cannot_run_starts_nothing(place: Playground) -> None:
    script = place.write("train.py", "open('ran', 'w')\n")
    for argv, cards in ((["missing.py"], _cards(2)), ([], _cards(2)), ([script], [])):
        with pytest.raises(SettingError):
            launch_script(argv, cards)
    assert not Path("ran").exists()
    assert not list(place.temporary.iterdir())


def test_what_chooses_the_same_cards_again() -> None:
    assert cards_setting(_cards(3)) == "cpu:3"
    assert cards_setting([Card(0, torch.device("cuda:2")), Card(1, torch.device("cuda:0"))]) == "2,0"
    assert cards_setting([Card(0, torch.device("cuda:2"))]) == "2,"
