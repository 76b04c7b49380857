"""``manycard run`` as a user starts it: real processes, simulated cards."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from manycard.cli.app import main
from tests.unit.launch.processes import Playground, wait_until

MANYCARD = ("-m", "manycard.cli")

TRAIN = """
    import os, sys
    import manycard as mc
    import torch
    from torch import nn

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(11, 4), torch.randn(11, 1))
    parallel = mc.Parallel(sys.argv[1], cards="cpu:2")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = parallel.setup(model, optimizer)
    loader = parallel.loader(data, batch_size=4)
    step = parallel.train_step(lambda m, b: nn.functional.mse_loss(m(b[0]), b[1]), model, optimizer)
    losses = [float(step(batch)) for batch in loader]
    parallel.print(parallel.strategy.name, parallel.world_size, *(f"{loss:.5f}" for loss in losses))
"""


def _run(place: Playground, *words: str) -> tuple[int, str, list[str]]:
    done = place.run(*MANYCARD, "run", *words)
    assert place.nothing_left()
    return done.returncode, done.stdout, done.stderr.splitlines()


def test_what_cannot_work_is_one_line_and_status_2(place: Playground, capsys: pytest.CaptureFixture[str]) -> None:
    script = place.write("train.py", "open('ran', 'w')\n")
    place.write("notes.txt", "these are not statements\n")
    for words, value in {
        ("missing.py",): "missing.py",
        (str(place.folder),): str(place.folder),
        ("notes.txt",): "notes.txt",
        ("-m", "missing.train"): "missing.train",
        ("--strategy", "ddpp", script): "ddpp",
        ("--precision", "fp8", script): "fp8",
        ("--cards", "cpu:0", script): "cpu:0",
        ("--cards", "0,9", script): "0,9",
        ("--strategy", "ddp", "--cards", "cpu:0", script): "cpu:0",
    }.items():
        assert main(["run", *words]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("manycard: ")
        assert err.count("\n") == 1
        assert repr(value) in err
    assert not Path("ran").exists()
    assert not list(place.temporary.iterdir())


def test_a_plain_script_runs_in_place_and_is_told_so(place: Playground) -> None:
    script = place.write("train.py", "import os, sys\nprint(sys.argv, __name__)\n")
    status, out, err = _run(place, script, "--cards", "9", "--", "-m")
    assert (status, out) == (0, f"{[script, '--cards', '9', '--', '-m']} __main__\n")
    assert err == ["manycard: nothing was spread: no module with parameters that require gradients was called"]


SINGLE_CARD = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(20, 4)), batch_size=int(sys.argv[1]), shuffle=True)
for (x,) in loader:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.5f}")
"""


@pytest.mark.timeout(300)
def test_a_single_card_script_is_spread_and_prints_the_same_log(place: Playground) -> None:
    script = place.write("train.py", SINGLE_CARD)
    plain = place.run(script, "8").stdout
    assert len(plain.splitlines()) == 3
    said = "Linear was spread in 3 of 3 calls"
    for words in (
        ["--cards", "cpu:3"],
        ["--strategy", "ddp", "--cards", "cpu:2"],
        ["--cards", "cpu:3", "--outputs", "spread"],
    ):
        status, out, err = _run(place, *words, script, "8")
        assert (status, out) == (0, plain)
        assert any(said in line for line in err)
    # With a document on standard output, what the script prints goes to standard error.
    status, out, err = _run(place, "--cards", "cpu:2", "--loader", "auto", "--json", script, "8")
    document = json.loads(out)
    assert (status, document["spread"][0]["spread"], document["spread"][0]["samples"]) == (0, 3, 20)
    assert [line for line in err if line in plain.splitlines()] == plain.splitlines()


@pytest.mark.timeout(300)
def test_fp16_is_for_scripts_that_scale_the_loss(place: Playground) -> None:
    script = place.write("train.py", SINGLE_CARD)
    for words in (["--cards", "cpu:2"], ["--cards", "cpu:1"], ["--strategy", "ddp", "--cards", "cpu:2"]):
        status, out, err = _run(place, *words, "--precision", "fp16", script, "8")
        assert (status, out, len(err)) == (2, "", 1), err
        assert err[0].startswith("manycard: --precision='fp16': it needs loss scaling")
        assert "Fix: use bf16" in err[0]
    place.write("helper.py", "import manycard as mc\nparallel = mc.Parallel(cards='cpu:2')\n")
    script = place.write(
        "parallel.py",
        "import torch\nfrom helper import parallel\nmodel, optimizer = torch.nn.Linear(4, 1), None\n"
        "model = parallel.setup(model)\nprint(parallel.precision.name, model(torch.ones(4, 4)).dtype)\n",
    )
    status, out, err = _run(place, "--precision", "fp16", script)
    assert (status, out) == (0, "fp16 torch.float32\n"), err


def test_options_for_loaders_are_checked(place: Playground, capsys: pytest.CaptureFixture[str]) -> None:
    script = place.write("train.py", "")
    assert main(["run", "--loader", "fast", script]) == 2
    assert main(["run", "--loader", "auto", "--strategy", "ddp", "--cards", "cpu:2", script]) == 2
    assert capsys.readouterr().err.count("--loader") >= 2


def test_which_outputs_stay_spread_is_checked(place: Playground, capsys: pytest.CaptureFixture[str]) -> None:
    script = place.write("train.py", "")
    assert main(["run", "--outputs", "here", script]) == 2
    assert "--outputs='here': there is no such choice. Fix: write auto, spread or gathered" in capsys.readouterr().err
    assert main(["run", "--outputs", "spread", "--strategy", "ddp", "--cards", "cpu:2", script]) == 2
    assert "every rank sees whole outputs" in capsys.readouterr().err


def test_a_script_that_raises_shows_pythons_own_traceback(place: Playground) -> None:
    script = place.write("train.py", "def f():\n    raise EOFError('no more')\nf()\n")
    status, out, err = _run(place, script)
    python = place.run(script)
    assert (status, out, err) == (1, "", python.stderr.splitlines())


@pytest.mark.timeout(300)
def test_exit_statuses_are_the_scripts(place: Playground) -> None:
    script = place.write("train.py", "import sys\nsys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 'no data')\n")
    assert _run(place, script, "3") == (3, "", [])
    assert _run(place, "-m", "train") == (1, "", ["no data"])
    status, out, err = _run(place, "--strategy", "ddp", "--cards", "cpu:2", script, "3")
    assert (status, out) == (3, "")
    assert "exited with status 3" in err[-1]


def test_in_ranks_the_first_failure_is_printed_once(place: Playground) -> None:
    script = place.write(
        "train.py",
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        print("rank", dist.get_rank())
        if dist.get_rank() == 1:
            raise ValueError("boom")
        dist.all_reduce(torch.ones(1))
        """,
    )
    status, out, err = _run_keeping_output(place, "--strategy", "ddp", "--cards", "cpu:2", script)
    assert (status, out) == (1, "rank 0\n")
    assert err[0] == "rank 1:"
    assert err[1:3] == ["Traceback (most recent call last):", f'  File "{script}", line 6, in <module>']
    assert err[-2] == "ValueError: boom"
    assert err[-1].startswith("manycard: rank 1 exited with status 1; the other ranks were stopped.")
    assert "\n".join(err).count("Traceback") == 1


def _run_keeping_output(place: Playground, *words: str) -> tuple[int, str, list[str]]:
    done = place.run(*MANYCARD, "run", *words)
    assert wait_until(lambda: not place.left(), 20)
    return done.returncode, done.stdout, done.stderr.splitlines()


@pytest.mark.timeout(300)
def test_json_is_all_there_is_on_standard_output(place: Playground) -> None:
    script = place.write("train.py", "import sys\nprint('hello')\nif len(sys.argv) > 1: raise ValueError('boom')\n")
    done = place.run(*MANYCARD, "run", "--json", script)
    document = json.loads(done.stdout)
    assert (document["status"], document["ranks"], document["error"]) == (0, None, None)
    assert "hello" in done.stderr
    done = place.run(*MANYCARD, "run", "--json", "--strategy", "ddp", "--cards", "cpu:2", script, "fail")
    document = json.loads(done.stdout)
    assert (done.returncode, document["status"], document["ranks"]) == (1, 1, 2)
    assert document["failed_rank"] in (0, 1)
    assert document["traceback"].endswith("ValueError: boom\n")


@pytest.mark.timeout(300)
def test_ctrl_c_is_status_130_and_leaves_nothing(place: Playground) -> None:
    script = place.write(
        "train.py",
        "import os, pathlib, time\npathlib.Path('ready' + os.environ.get('RANK', '')).touch()\ntime.sleep(300)\n",
    )
    for words, ready in (((), 1), (("--strategy", "ddp", "--cards", "cpu:2"), 2)):
        for file in Path().glob("ready*"):
            file.unlink()
        with place.start(*MANYCARD, "run", *words, script) as process:
            assert wait_until(lambda: len(list(Path().glob("ready*"))) == ready, 80)  # noqa: B023
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        assert (process.returncode, out) == (130, "")
        assert err.strip() == "manycard: interrupted"
        assert place.nothing_left()


@pytest.mark.timeout(300)
def test_one_script_in_place_and_in_ranks_trains_the_same(place: Playground) -> None:
    script = place.write("train.py", TRAIN)
    status, in_place, err = _run(place, script, "dp")
    assert (status, err) == (0, [])
    assert in_place.split()[:2] == ["dp", "1"]
    status, ranks, err = _run(place, script, "ddp")  # which the script asks for by itself, on two cards
    assert status == 0, err
    assert ranks.split()[:2] == ["ddp", "2"]
    assert "train.py asks for one process per card (strategy ddp): starting ranks" in err[0]
    status, chosen, err = _run(place, "--strategy", "ddp", "--cards", "cpu:3", script, "dp")
    assert status == 0, err
    assert chosen.split()[:2] == ["ddp", "3"]
    assert any("'ddp' from the command line replaces 'dp'" in line for line in err)
    assert in_place.split()[2:] == ranks.split()[2:] == chosen.split()[2:]
    assert len(in_place.split()) == 5


def _of_a_plain_script(place: Playground, *words: str) -> tuple[int, str, list[str]]:
    done = place.run(*MANYCARD, "run", *words)
    assert not place.left()  # PyTorch's folder of compiled code stays
    return done.returncode, done.stdout, done.stderr.splitlines()


@pytest.mark.timeout(300)
def test_a_strategy_that_nothing_follows_is_refused_before_anything_is_trained(place: Playground) -> None:
    script = place.write("train.py", SINGLE_CARD)
    status, out, err = _of_a_plain_script(place, "--strategy", "manual", "--cards", "cpu:2", script, "8")
    assert (status, out) == (2, "")
    assert err[-1].startswith(f"manycard: --strategy='manual': {script} makes no mc.Parallel")
    assert "Fix: give dp or ddp" in err[-1]
    later = place.write("later.py", SINGLE_CARD + 'import manycard as mc\nprint(mc.Parallel("dp").strategy.name)\n')
    status, out, err = _of_a_plain_script(place, "--strategy", "manual", "--cards", "cpu:2", later, "8")
    assert (status, out.splitlines()[-1]) == (0, "manual")  # what it trains before is its own


@pytest.mark.timeout(300)
def test_one_card_is_what_single_asks_for(place: Playground) -> None:
    script = place.write("train.py", SINGLE_CARD)
    plain = place.run(script, "8").stdout
    status, out, err = _of_a_plain_script(place, "--strategy", "single", "--cards", "cpu:2", script, "8")
    assert (status, out) == (0, plain)
    assert err[-1] == "manycard: ran on one card, cpu:0, as strategy single says; dp would spread it"
    status, out, err = _of_a_plain_script(place, "--strategy", "single", "--precision", "bf16", script, "8")
    assert status == 0
    assert out != plain  # the precision is the command line's, as with many cards
