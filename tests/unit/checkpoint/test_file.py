"""A checkpoint is written whole or not at all, and read back equal or refused in words."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from manycard.checkpoint import file, read_checkpoint, write_checkpoint
from manycard.checkpoint.file import FORMAT, VERSION
from manycard.errors import CheckpointError

SOURCES = str(Path(__file__).parents[3] / "src")


def _child(code: str, *arguments: object, wait: bool = True) -> subprocess.Popen[str]:
    """A Python of its own that runs `code`."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if wait:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
    return process


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool(left == right)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(5, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "plain": [1, 2.5, True, None, "text", b"bytes", 3j, (1, (2,)), {"deep": {3: [4]}}, {5}],
        "format": "a key of the user's own",
        "half": torch.rand(4).to(torch.bfloat16),
    }
    write_checkpoint(tmp_path / "deep" / "er" / "last.pt", state)
    read = read_checkpoint(str(tmp_path / "deep" / "er" / "last.pt"))
    assert _equal(state, read)
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    other.load_state_dict(read["model"])
    assert other.state_dict().keys() == model.state_dict().keys()


def test_the_file_says_what_it_is(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a.pt", {"epoch": 1})
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    assert (content["format"], content["version"]) == (FORMAT, VERSION)


def test_a_read_tensor_outlives_the_file_and_may_be_written_to(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    write_checkpoint(path, {"x": torch.arange(100_000)})
    read = read_checkpoint(path)["x"]
    write_checkpoint(path, {"x": torch.zeros(100_000)})
    path.unlink()
    read += 1
    assert torch.equal(read, torch.arange(1, 100_001))


def test_kind_ckpt_map_location_tensors_of_cards_are_read_to_the_cpu(tmp_path: Path) -> None:
    """A file whose tensors say ``cuda:1`` is what rank 1 writes; any machine, and any rank, reads it to the CPU."""
    path = tmp_path / "a.pt"
    write_checkpoint(path, {"x": torch.arange(4.0)})
    raw = path.read_bytes()
    # In the pickle a storage's place is a string behind its length: X\x03\x00\x00\x00cpu.
    assert raw.count(b"X\x03\x00\x00\x00cpu") == 1
    _rewrite_pickle(path, b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:1")
    read = read_checkpoint(path)["x"]
    assert read.device.type == "cpu"
    assert torch.equal(read, torch.arange(4.0))


def _rewrite_pickle(path: Path, old: bytes, new: bytes) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = [(entry, archive.read(entry)) for entry in archive.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for entry, data in entries:
            archive.writestr(entry.filename, data.replace(old, new) if entry.filename.endswith("data.pkl") else data)


def test_the_old_file_stands_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.pt"
    write_checkpoint(path, {"epoch": 1})

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(path, {"epoch": 2})
    monkeypatch.undo()
    assert read_checkpoint(path) == {"epoch": 1}
    assert os.listdir(tmp_path) == ["last.pt"]


def test_ctrl_c_while_bytes_are_written_stays_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def write(self, data: object) -> int:
            raise KeyboardInterrupt

        def flush(self) -> None: ...

    original = file._Sink.__init__
    monkeypatch.setattr(file._Sink, "__init__", lambda self, _: original(self, Interrupted()))
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "last.pt", {"x": torch.rand(1000)})
    assert os.listdir(tmp_path) == []


LIMITED = """
import os, resource, sys, torch
from manycard.checkpoint import file, read_checkpoint, write_checkpoint
from manycard.errors import CheckpointError
path = sys.argv[1]
write_checkpoint(path, {"epoch": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    write_checkpoint(path, {"x": torch.zeros(1 << 20)})
except CheckpointError as error:
    assert "File too large" in str(error) and path in str(error) and "Fix: free space" in str(error), error
else:
    raise SystemExit("no error")
assert read_checkpoint(path) == {"epoch": 1}
assert os.listdir(os.path.dirname(path)) == ["last.pt"], os.listdir(os.path.dirname(path))
"""


def test_a_file_size_limit_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    _child(LIMITED, tmp_path / "last.pt")


def _mounted(folder: Path) -> bool:
    """Mount a file system of 1 MiB on `folder`; False where that is not allowed."""
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    if not _mounted(tmp_path):
        pytest.skip("mounting a file system is not allowed here")
    try:
        path = tmp_path / "last.pt"
        write_checkpoint(path, {"epoch": 1})
        with pytest.raises(CheckpointError, match=r"No space left on device; \d MiB are free there\. Fix: free space"):
            write_checkpoint(path, {"x": torch.zeros(1 << 20)})
        assert read_checkpoint(path) == {"epoch": 1}
        assert os.listdir(tmp_path) == ["last.pt"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


KILLED = """
import sys, torch
from manycard.checkpoint import write_checkpoint
state = {"x": torch.zeros(60_000_000)}
print("ready", flush=True)
write_checkpoint(sys.argv[1], state)
"""


def test_a_process_killed_while_it_saves_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    write_checkpoint(path, {"epoch": 1})
    process = _child(KILLED, path, wait=False)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    end = time.monotonic() + 30
    while len(os.listdir(tmp_path)) == 1 and time.monotonic() < end:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    process.stdout.close()
    assert len(os.listdir(tmp_path)) == 2, "it must have been killed before it was done"
    assert read_checkpoint(path) == {"epoch": 1}
    write_checkpoint(path, {"epoch": 2})
    assert os.listdir(tmp_path) == ["last.pt"], "the next save clears what the killed process left"
    assert read_checkpoint(path) == {"epoch": 2}


RACING = """
import sys, torch
from manycard.checkpoint import file, read_checkpoint, write_checkpoint
from pathlib import Path
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
for turn in range(10):
    shared = folder / f"turn{turn}" / "new" / "last.pt"
    write_checkpoint(shared, {"rank": rank, "x": torch.full((1000,), rank)})
    write_checkpoint(shared.with_name(f"rank{rank}.pt"), {"rank": rank})
    state = read_checkpoint(shared)
    assert (state["x"] == state["rank"]).all()
"""


def test_kind_ckpt_race_ranks_make_one_folder_and_write_one_file(tmp_path: Path) -> None:
    processes = [_child(RACING, tmp_path, rank, wait=False) for rank in range(3)]
    for process in processes:
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 0, output
    assert sorted(os.listdir(tmp_path / "turn9" / "new")) == ["last.pt", "rank0.pt", "rank1.pt", "rank2.pt"]


FORBIDDEN = """
import os, sys, torch
from manycard.checkpoint import read_checkpoint, write_checkpoint
from manycard.errors import CheckpointError
if os.geteuid() == 0:
    os.setuid(65534)
try:
    write_checkpoint(sys.argv[1], {"epoch": 1})
except CheckpointError as error:
    assert "Permission denied" in str(error) and "writable for this user" in str(error), error
else:
    raise SystemExit("no error")
try:
    read_checkpoint(sys.argv[1])
except CheckpointError as error:
    assert sys.argv[1] in str(error), error
else:
    raise SystemExit("no error")
"""


def test_a_folder_that_is_not_writable(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0o555)
    _child(FORBIDDEN, folder / "last.pt")
    folder.chmod(0o755)


def test_paths_that_are_in_the_way(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is a directory.*Fix"):
        write_checkpoint(tmp_path, {})
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="one of the folders in that path is a file"):
        write_checkpoint(tmp_path / "file" / "last.pt", {})
    with pytest.raises(CheckpointError, match="File name too long"):
        write_checkpoint(tmp_path / ("x" * 300), {})
    write_checkpoint(tmp_path / ("x" * 250), {"epoch": 1})
    assert sorted(os.listdir(tmp_path)) == ["file", "x" * 250]


def test_a_link_keeps_pointing_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "last.pt").symlink_to(tmp_path / "runs" / "seven.pt")
    write_checkpoint(tmp_path / "last.pt", {"epoch": 7})
    assert (tmp_path / "last.pt").is_symlink()
    assert read_checkpoint(tmp_path / "runs" / "seven.pt") == {"epoch": 7}


def test_the_mode_is_that_of_other_new_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a.pt", {})
    (tmp_path / "b").write_text("")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a.pt", "b")}
    assert len(modes) == 1


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*missing\.pt.*there is no folder"):
        read_checkpoint(tmp_path / "none" / "missing.pt")
    write_checkpoint(tmp_path / "other.pt", {})
    with pytest.raises(CheckpointError, match=r"missing\.pt.*Fix: give one of the files in .*: other\.pt"):
        read_checkpoint(tmp_path / "missing.pt")
    with pytest.raises(CheckpointError, match="is a directory"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_files_cut_short(tmp_path: Path, share: float) -> None:
    path = tmp_path / "a.pt"
    write_checkpoint(path, {"x": torch.rand(10_000)})
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(CheckpointError, match=rf"{path} is (empty|damaged).*Fix"):
        read_checkpoint(path)


class _RunsCode:
    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_text("hello")
    with pytest.raises(CheckpointError, match=r"a\.pt is not a manycard checkpoint.*Fix"):
        read_checkpoint(path)
    torch.save(nn.Linear(2, 2).state_dict(), path)
    with pytest.raises(CheckpointError, match=r"not a manycard checkpoint.*torch\.load"):
        read_checkpoint(path)
    torch.save({"format": FORMAT, "version": 1, "state": _RunsCode()}, path)
    with pytest.raises(CheckpointError, match="would run code"):
        read_checkpoint(path)
    torch.save({"format": FORMAT, "version": VERSION + 1, "state": {}}, path)
    with pytest.raises(CheckpointError, match=rf"newer manycard wrote .*version {VERSION + 1}.*pip install"):
        read_checkpoint(path)


class _Unknown:
    pass


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"model": nn.Linear(2, 2)}, r"model is a torch.nn.modules.linear.Linear.*Fix: save model\.state_dict\(\)"),
        ({"extra": {"history": [1, _Unknown()]}}, r"extra\['history'\]\[1\] is a .*_Unknown"),
        ({"f": lambda: 0}, "f is a builtins.function"),
        ({"x": OrderedDict(a=(1, Path("x")))}, r"x\['a'\]\[1\] is a pathlib"),
        ({"x": {Path("x"): 1}}, "a key of x"),
        ({1: 2}, "1 can't be a key"),
    ],
)
def test_values_that_cannot_be_read_back_are_refused_by_name(tmp_path: Path, state: Any, named: str) -> None:
    path = tmp_path / "a.pt"
    with pytest.raises(CheckpointError, match=named):
        write_checkpoint(path, state)
    assert os.listdir(tmp_path) == []


def test_a_value_that_holds_itself(tmp_path: Path) -> None:
    state: dict[str, Any] = {"x": []}
    state["x"].append(state["x"])
    with pytest.raises(CheckpointError, match="holds itself"):
        write_checkpoint(tmp_path / "a.pt", state)


class _Allowed:
    def __init__(self) -> None:
        self.value = 3


def test_what_pytorch_is_told_to_allow_is_written(tmp_path: Path) -> None:
    state = {"count": Counter("aab"), "mine": _Allowed()}
    with pytest.raises(CheckpointError, match="mine is a"):
        write_checkpoint(tmp_path / "a.pt", state)
    with torch.serialization.safe_globals([_Allowed]):
        write_checkpoint(tmp_path / "a.pt", state)
        read = read_checkpoint(tmp_path / "a.pt")
    assert read["count"] == Counter("aab")
    assert read["mine"].value == 3
