"""``manycard bench``: what it prints, saves and returns, as a user's shell sees it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from manycard.cli import main

SMALL = ["bench", "--workload", "mlp", "--small", "--cards", "cpu:2"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "manycard.cli", *arguments]


def test_json_is_alone_on_standard_output_and_results_are_saved(tmp_path: Path) -> None:
    out = tmp_path / "a folder"
    words = command(
        *SMALL, "--steps", "3", "--batch", "9", "--strategies", "single,torch_dp,dp", "--json", "--out", str(out)
    )
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [(row["strategy"], row["cards"], row["batch"], row["scaling"]) for row in document["rows"]] == [
        ("single", 1, 9, "strong"),
        ("dp", 2, 9, "strong"),
    ]
    assert document["rows"][1]["per_card_batch"] == 5
    assert len(document["rows"][1]["losses"]) >= 4
    assert document["rows"][1]["largest_loss_difference"] < 1e-5
    assert json.loads((out / "bench.json").read_text()) == document
    assert "<svg" not in done.stdout
    assert "data:image/svg+xml" in (out / "bench.html").read_text()
    assert f"report: {out / 'bench.html'}" in done.stderr
    saved = ["bench.csv", "bench.html", "bench.json", "bench.md", "rounds.jsonl"]
    assert sorted(path.name for path in out.iterdir()) == saved
    assert [line.split(",")[2:4] for line in (out / "bench.csv").read_text().splitlines()] == [
        ["strategy", "cards"],
        ["single", "1"],
        ["dp", "2"],
    ]
    assert "| dp | 2 |" in (out / "bench.md").read_text()


def test_an_interrupt_prints_and_saves_the_rows_done(tmp_path: Path) -> None:
    endless = ["--workload", "digits,mlp", "--epochs", "1", "--steps", "10000000", "--strategies", "single"]
    words = command(*SMALL[:1], *SMALL[3:], *endless, "--json", "--out", str(tmp_path))
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if line.startswith("mlp single on 1 card ..."):
            break
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    printed, rest = process.communicate(timeout=60)
    assert process.returncode == 130, said + rest
    document = json.loads(printed)
    assert [row["workload"] for row in document["rows"]] == ["digits"]
    assert document["interrupted"]
    assert json.loads((tmp_path / "bench.json").read_text()) == document
    assert not [member for member in family if member.is_running()]


def test_a_row_that_fails_gives_status_1_and_the_table_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main([*SMALL, "--batch", str(10**13), "--strategies", "single", "--out", str(tmp_path)])
    assert status == 1
    assert "single on 1: out of memory: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch", "4", "--per-card-batch", "2"], "--per-card-batch=2"),
        (["--workload", "nope"], "--workload='nope'"),
        (["--counts", "1,x"], "--counts='1,x'"),
        (["--counts", "5"], "--counts=5"),
        (["--strategies", "dpp"], "--strategies='dpp'"),
        (["--precision", "fp7"], "precision='fp7'"),
        (["--cards", "cpu:0"], "cpu:0"),
        (["--steps", "many"], "--steps"),
        (["--set", "graphs=maybe"], "--set='graphs=maybe'"),
        (["--set", "graphs"], "--set='graphs'"),
        (["--against", "/nowhere/bench.json"], "--against"),
        (["--time-limit", "0"], "--time-limit"),
        (["--only", "ddp"], "--only='ddp'"),
        (["--ablate", "--set", "graphs=on"], "--set"),
        (["--ablate", "--only", "nope"], "--only='nope'"),
        (["train.py"], "SCRIPT='train.py'"),
        (["-m"], "-m"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "--out", str(tmp_path / "out"), *words]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert printed.out == ""
    assert not (tmp_path / "out").exists()


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").touch()
    assert main([*SMALL, "--out", str(tmp_path / "out")]) == 2
    assert "--out=" in capsys.readouterr().err


def test_without_the_report_extra_the_table_is_still_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main([*SMALL, "--steps", "1", "--strategies", "single", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "samples/s" in printed.out
    assert "manycard[report]" in printed.err
    assert "bench.html" not in [path.name for path in tmp_path.iterdir()]


SCRIPT = """
import sys
import torch
from torch import nn
import manycard as mc

data = torch.randn(64, 4)
model = nn.Linear(4, 1)
parallel = mc.Parallel("dp", cards="cpu:2")
model, optimizer = parallel.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
step = parallel.train_step(lambda model, batch: model(batch).square().mean(), model, optimizer)
loader = parallel.loader(data, batch_size=int(sys.argv[sys.argv.index("--size") + 1]))
while True:
    for batch in loader:
        step(batch)
"""


def test_a_script_with_settings_is_measured_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, earlier, out = tmp_path / "train.py", tmp_path / "earlier", tmp_path / "out"
    script.write_text(SCRIPT)
    words = ["bench", str(script), "--strategy", "single", "--cards", "cpu:2", "--steps", "6"]
    words += ["--set", "accumulate=1,2", "--json", "--out"]
    first = subprocess.run(
        command(*words, str(earlier), "--", "--size", "16"), capture_output=True, text=True, timeout=100, check=False
    )
    assert first.returncode == 0, first.stderr
    document = json.loads(first.stdout)
    assert [(row["workload"], row["batch"], row["settings"]) for row in document["rows"]] == [
        ("train.py", 16, {"accumulate": 1}),
        ("train.py", 16, {"accumulate": 2}),
    ]
    # An earlier run in which the first row was ten times as fast, and the second a tenth.
    for row, factor in zip(document["rows"], (10.0, 0.1), strict=True):
        row["samples_per_s"] *= factor
        row["noise"] = 0.01
    (earlier / "bench.json").write_text(json.dumps(document))
    # Nothing is left to run: the rounds of the first run are taken up.
    out.mkdir()
    (out / "rounds.jsonl").write_text((earlier / "rounds.jsonl").read_text())
    compared = [*words, str(out), "--resume", "--against", str(earlier), "--", "--size", "16"]
    status, printed = main(compared), capsys.readouterr()
    assert status == 1, printed.err
    assert "single on 1 card" not in printed.err, "no row was run"
    found = json.loads(printed.out)["comparison"]
    assert [row["verdict"] for row in found["rows"]] == ["slower", "faster"]
    assert found["worse"] == 1
    assert "slower" in (out / "bench.md").read_text()
    assert "slower" in (out / "bench.html").read_text()


def test_a_training_is_taken_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "--ablate", "--workload", "mlp", "--small", "--cards", "cpu:2", "--steps", "4", "--batch", "8"]
    status = main([*words, "--only", "engine,graphs", "--out", str(tmp_path)])
    printed = capsys.readouterr()
    assert status == 0, printed.out
    for line in ("nn.DataParallel as people write it", "+ manycard's engine", "no CUDA graphs"):
        assert line in printed.out
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [(row["part"], row["step"]) for row in rows] == [
        ("baseline", "baseline"),
        ("alone", "engine"),
        ("alone", "graphs"),
        ("together", "engine"),
    ]
    assert rows[-1]["losses"][:5] == pytest.approx(rows[0]["losses"][:5], rel=1e-4), "it is the same training"
    assert (tmp_path / "bench.html").read_text().count("data:image/svg+xml") == 2


def test_bench_data_is_a_command_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "data", "--help"]) == 0
    assert "how fast images come from files" in capsys.readouterr().out
