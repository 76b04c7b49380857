"""``manycard run --strategy ddp`` of scripts written for one card, as a user starts it."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.unit.launch.processes import Playground, wait_until

RANKS = ("-m", "manycard.cli", "run", "--strategy", "ddp", "--cards", "cpu:2")

TRAIN = """
    import os, random, shutil, sys, tempfile
    from pathlib import Path
    import numpy as np
    import torch
    from torch import nn

    print(sys.argv, __name__, Path(__file__).name, Path(sys.path[0]).name)
    print([name for name in os.environ if name.endswith("ANK") or name.startswith("TORCHELASTIC")])
    if not os.path.exists("data.pt"):
        torch.save([torch.randn(50, 4), torch.randn(50, 1)], "data.pt")
    torch.manual_seed(1)
    x, y = torch.load("data.pt")
    os.mkdir("out")
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, num_workers=int(sys.argv[1]))
    best = float("inf")
    for epoch in range(3):
        total = 0.0
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        if total < best:
            best = total
            torch.save(model.state_dict(), "out/best.tmp")
            os.replace("out/best.tmp", "out/best.pt")
        with open("out/log.txt", "a") as log:
            print(f"{epoch} {total:.4f}", file=log)
        print(f"epoch {epoch}: {total:.4f}")
    model.load_state_dict(torch.load("out/best.pt"))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "note.txt").write_text("temporary")
        shutil.copy(Path(folder, "note.txt"), "out/note.txt")
    with torch.no_grad():
        print(f"{nn.functional.mse_loss(model(x), y):.4f}", Path("out/log.txt").read_text(), sorted(os.listdir("out")))
    print(f"{torch.rand(1).item():.6f}")
    sys.exit(0)
"""


@pytest.mark.timeout(300)
def test_a_script_prints_and_writes_what_it_does_on_one_card(place: Playground) -> None:
    script = place.write("train.py", TRAIN)
    place.run(
        "-c", "import torch; torch.manual_seed(0); torch.save([torch.randn(50, 4), torch.randn(50, 1)], 'data.pt')"
    )
    before = place.folder / "data.pt"
    plain = place.run(script, "1")
    assert plain.returncode == 0, plain.stderr
    (place.folder / "out").rename(place.folder / "plain")
    done = place.run(*RANKS, script, "1")
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "manycard: cards cpu:0, cpu:1: Sequential was spread in 13 of 13 calls"
    )
    assert sorted(path.name for path in (place.folder / "out").iterdir()) == ["best.pt", "log.txt", "note.txt"]
    for name in ("log.txt", "note.txt"):
        assert (place.folder / "out" / name).read_text() == (place.folder / "plain" / name).read_text()
    assert before.exists()
    for cache in place.temporary.glob("torchinductor_*"):  # which plain Python leaves, too
        shutil.rmtree(cache)
    assert place.nothing_left()


@pytest.mark.timeout(300)
def test_unseeded_draws_of_the_usual_generators_are_alike_and_json_says_what_was_spread(place: Playground) -> None:
    script = place.write(
        "train.py",
        """
        import random
        import numpy as np
        import torch
        model = torch.nn.Linear(3, 1)
        words = list({"one", "two", "three", "four", "five"})
        for _ in range(6):
            x = torch.randn(8, 3) + random.random() + np.random.rand() + len(words[0])
            model(x).sum().backward()
        if not __import__("os").path.exists("made.txt"):
            torch.rand(5)
            open("made.txt", "w").close()
        model(torch.randn(8, 3)).sum().backward()
        """,
    )
    done = place.run(*RANKS, "--json", script)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [(report["name"], report["spread"], report["whole"]) for report in document["spread"]] == [("Linear", 7, 0)]
    assert place.nothing_left()


def _fails(place: Playground, text: str, *words: str) -> list[str]:
    done = place.run(*RANKS, place.write("train.py", text), *words)
    assert done.returncode == 1
    assert wait_until(lambda: not place.left(), 20)
    return done.stderr.splitlines()


@pytest.mark.timeout(300)
def test_a_traceback_begins_with_the_scripts_first_frame(place: Playground) -> None:
    text = """
        import torch
        model = torch.nn.Linear(3, 1)
        model(torch.ones(4, 3)).sum().backward()
        def stop():
            raise EOFError("no more")
        stop()
    """
    err = _fails(place, text)
    start = err.index("Traceback (most recent call last):")
    assert err[start - 1] in ("rank 0:", "rank 1:")
    assert err[start + 1] == f'  File "{place.folder / "train.py"}", line 7, in <module>'
    assert any(line == "EOFError: no more" for line in err)


@pytest.mark.timeout(300)
def test_scripts_that_drift_apart_are_stopped(place: Playground) -> None:
    text = """
        import os, sys
        import numpy as np, torch
        model, steps = torch.nn.Linear(3, 1), 6
        if sys.argv[1] == "draws":
            shuffle = np.random.default_rng().permutation(64)
        else:
            shuffle = np.arange(64)
            steps = 6 if os.environ["MANYCARD_RANK_FOLDER"].endswith("0") else 9
        data = torch.randn(64, 3)[shuffle]
        for step in range(steps):
            model(data[:8]).sum().backward()
    """
    err = "\n".join(_fails(place, text, "draws"))
    assert "LockstepError: the ranks' scripts have drifted apart: in call 1 of Linear the inputs differ" in err
    assert "Fix: seed every generator" in err
    err = "\n".join(_fails(place, text, "steps"))
    assert "the one of rank 0 ended after 6 calls, and that of rank 1 goes on" in err


@pytest.mark.timeout(300)
def test_ctrl_c_leaves_nothing(place: Playground) -> None:
    script = place.write(
        "train.py",
        """
        import pathlib, torch
        model = torch.nn.Linear(3, 1)
        while True:
            model(torch.ones(4, 3)).sum().backward()
            pathlib.Path("ready").touch()
        """,
    )
    with place.start(*RANKS, script) as process:
        assert wait_until(Path("ready").exists, 60)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130
    assert place.nothing_left()
