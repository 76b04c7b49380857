"""``manycard verify`` as a user starts it: small scripts of every kind, on two simulated cards."""

from __future__ import annotations

import json
from typing import Any

import pytest

from manycard.cli.app import main
from tests.unit.launch.processes import Playground, wait_until

PLAIN = """
    import sys
    import torch
    from torch import nn

    layer = {"dropout": nn.Dropout(0.5), "batchnorm": nn.BatchNorm1d(8), "relu": nn.ReLU()}[sys.argv[1]]
    model = nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x, y = torch.randn(47, 4), torch.randn(47, 1)
    for start in range(0, 47, 8):
        print("a step")
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[start : start + 8]), y[start : start + 8]).backward()
        optimizer.step()
"""

PARALLEL = """
    import sys
    import manycard as mc
    import torch
    from torch import nn

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(11, 4), torch.randn(11, 1))
    parallel = mc.Parallel(seed=0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = parallel.setup(model, optimizer)
    loader = parallel.loader(data, batch_size=4, shuffle=True)
    loss_fn = lambda m, b: nn.functional.mse_loss(m(b[0]), b[1], reduction=sys.argv[1])
    step = parallel.train_step(loss_fn, model, optimizer, check_loss=False)
    for batch in loader:
        step(batch)
"""

DDP = """
    import sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(21, 4), torch.randn(21, 1))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data) if "sampler" in sys.argv else None
    loader = DataLoader(data, batch_size=4, shuffle=sampler is None, sampler=sampler)
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()
"""


def _verify(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    status = main(["verify", "--json", "--cards", "cpu:2", *words])
    return status, json.loads(capsys.readouterr().out)


def _nothing_left(place: Playground) -> bool:
    """No process and no file of manycard's; PyTorch keeps its compiler's folder."""
    return wait_until(lambda: not place.left() and not list(place.temporary.glob("manycard*")), 20)


def _causes(document: dict[str, Any]) -> str:
    return "; ".join(cause["cause"] for cause in document["causes"])


def test_a_plain_script_is_the_same_training(place: Playground, capsys: pytest.CaptureFixture[str]) -> None:
    status, document = _verify(capsys, place.write("train.py", PLAIN), "relu")
    assert (status, document["same"], document["steps"]) == (0, True, 6)
    assert document["first_difference"] is None
    assert document["causes"] == []
    assert document["largest"]["loss"] < 1e-6
    assert 0 < document["largest"]["gradient"]["value"] < 1e-6
    assert document["largest"]["gradient"]["parameter"] in ("0.weight", "0.bias", "2.weight", "2.bias")
    assert document["cards"] == ["cpu:0", "cpu:1"]
    assert document["spread"][0]["spread"] == 6
    assert _nothing_left(place)


def test_the_words_for_people(place: Playground, capsys: pytest.CaptureFixture[str]) -> None:
    script = place.write("train.py", PLAIN)
    assert main(["verify", "--cards", "cpu:2", "--steps", "2", "--strategy", "dp", "train.py", "relu"]) == 0
    out, err = capsys.readouterr()
    assert "The same training: 2 steps on one card and on 2 cards (cpu:0, cpu:1) agree." in out
    assert "at most 0.0001" in out
    assert "a step" not in out
    assert err.splitlines() == [
        "manycard: running train.py on one card, 2 steps at most",
        "manycard: running train.py on 2 cards, 2 steps at most",
    ]
    assert script.endswith("train.py")


def test_dropout_is_found(place: Playground, capsys: pytest.CaptureFixture[str]) -> None:
    status, document = _verify(capsys, place.write("train.py", PLAIN), "dropout")
    assert (status, document["same"]) == (1, False)
    assert document["first_difference"]["step"] == 1
    assert document["first_difference"]["what"] == "loss"
    assert document["first_difference"]["where"] == "train.py:13"
    assert _causes(document) == "forward draws at random (dropout, noise), and each card draws its own"


@pytest.mark.timeout(300)
def test_batchnorm_is_found_and_mended(place: Playground, capsys: pytest.CaptureFixture[str]) -> None:
    script = place.write("train.py", PLAIN)
    status, document = _verify(capsys, script, "batchnorm")
    assert (status, document["same"]) == (1, False)
    assert _causes(document) == "BatchNorm takes its statistics from each card's part of the batch"
    status, document = _verify(capsys, "--sync-batchnorm", script, "batchnorm")
    assert (status, document["same"], document["causes"]) == (0, True, [])
    assert document["set_aside"] == ["0.bias"]  # BatchNorm takes it out again, and Adam follows its rounding


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_a_script_with_parallel(place: Playground, capsys: pytest.CaptureFixture[str], strategy: str) -> None:
    script = place.write("train.py", PARALLEL)
    status, document = _verify(capsys, "--strategy", strategy, script, "mean")
    assert (status, document["same"], document["steps"]) == (0, True, 3)
    status, document = _verify(capsys, "--strategy", strategy, script, "sum")
    assert (status, document["same"]) == (1, False)
    assert _causes(document) == "the loss is a sum over samples, where a mean is taken over cards"
    assert document["first_difference"]["where"] == "train.py:17"
    assert _nothing_left(place)


def test_a_plain_script_in_ranks(place: Playground, capsys: pytest.CaptureFixture[str]) -> None:
    script = place.write("train.py", PLAIN)
    status, document = _verify(capsys, "--strategy", "ddp", script, "relu")
    assert (status, document["same"], document["steps"]) == (0, True, 6)
    assert (document["causes"], document["not_checked"]) == ([], [])
    assert 0 < document["largest"]["gradient"]["value"] < 1e-6
    assert document["cards"] == ["cpu:0", "cpu:1"]
    assert document["spread"][0]["spread"] == 6
    assert _nothing_left(place)


def test_a_plain_script_follows_no_other_strategy(place: Playground, capsys: pytest.CaptureFixture[str]) -> None:
    script = place.write("train.py", PLAIN)
    assert main(["verify", "--strategy", "torch_dp", "--cards", "cpu:2", script, "relu"]) == 2
    assert "train.py makes no mc.Parallel that could follow it" in capsys.readouterr().err
    assert _nothing_left(place)


@pytest.mark.timeout(300)
def test_a_script_for_torchrun(place: Playground, capsys: pytest.CaptureFixture[str]) -> None:
    script = place.write("train.py", DDP)
    status, document = _verify(capsys, script, "sampler")
    assert (status, document["same"], document["steps"]) == (0, True, 6)
    causes = _causes(document)
    assert "every epoch goes through the samples in the same order" in causes  # there is no set_epoch
    assert "some samples are used twice" in causes  # 21 samples for two ranks
    status, document = _verify(capsys, "--steps", "2", script)
    assert (status, document["same"]) == (1, False)
    assert document["first_difference"]["what"] == "data"
    assert _causes(document).startswith("ranks train on the same samples")
    assert _nothing_left(place)


@pytest.mark.timeout(300)
def test_a_script_that_fails_shows_its_traceback(place: Playground, capsys: pytest.CaptureFixture[str]) -> None:
    script = place.write("train.py", "import torch\nraise ValueError('no data')\n")
    assert main(["verify", "--json", "--cards", "cpu:2", script]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "ValueError: no data" in err
    assert err.splitlines()[-1] == f"manycard: {script} failed on one card, so there is nothing to compare."
    script = place.write("ranks.py", "import os, torch\nif os.environ['RANK'] == '1': raise ValueError('no data')\n")
    assert main(["verify", "--strategy", "torchrun", "--cards", "cpu:2", script]) == 1
    err = capsys.readouterr().err
    assert "rank 1:\nTraceback" in err
    assert "ValueError: no data" in err
    assert _nothing_left(place)


def test_a_script_that_does_not_train_is_told_so(place: Playground, capsys: pytest.CaptureFixture[str]) -> None:
    script = place.write("train.py", "print('hello')\n")
    assert main(["verify", "--cards", "cpu:2", script]) == 1
    assert "ended without an optimizer step or a backward pass" in capsys.readouterr().err


def test_what_cannot_work_is_one_line_and_status_2(place: Playground, capsys: pytest.CaptureFixture[str]) -> None:
    script, ranks = place.write("train.py", PLAIN), place.write("ranks.py", DDP)
    for words, value in {
        ("missing.py",): "missing.py",
        ("--strategy", "single", script): "single",
        ("--strategy", "fast", script): "fast",
        ("--steps", "0", script): "0",
        ("--cards", "cpu:1", script): "cpu:1",
        ("--cards", "0,9", script): "0,9",
        ("--sync-batchnorm", ranks): "--sync-batchnorm",
    }.items():
        assert main(["verify", *words]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert value in err
    assert _nothing_left(place)
