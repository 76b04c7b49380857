"""Ranks above 0 see what they write, rank 0 alone writes it, and neither sees what the other is about to do."""

from __future__ import annotations

import builtins
import bz2
import glob
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from manycard.script.files.calls import stand_in
from manycard.script.files.journal import Journal, JournaledFiles
from manycard.script.files.overlay import OverlayFiles


class Ranks:
    """Rank 0 and rank 1 in one process, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.work, scratch = folder / "work", folder / "scratch"
        self.work.mkdir()
        scratch.mkdir()
        self._scratch = scratch
        self._first = JournaledFiles(Journal(scratch / "journal"))
        self._second = OverlayFiles(scratch / "files", Journal(scratch / "journal"), [str(scratch)])

    @contextmanager
    def rank(self, number: int) -> Iterator[None]:
        """Be that rank."""
        end = stand_in(self._second if number else self._first, reads=bool(number))
        try:
            yield
        finally:
            end()

    def written(self) -> dict[str, bytes]:
        """What is really there."""
        return _contents(self.work)


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"/" for p in sorted(folder.rglob("*"))}


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    made = Ranks(tmp_path)
    monkeypatch.chdir(made.work)
    return made


def _save_best_and_load_it() -> object:
    os.makedirs("out/best", exist_ok=True)
    for step in range(3):
        torch.save({"step": step, "w": torch.ones(2)}, "out/best/model.tmp")
        os.replace("out/best/model.tmp", "out/best/model.pt")
    return torch.load("out/best/model.pt")["step"]


def _log() -> object:
    with open("log.txt", "w") as log:
        log.write("one\n")
    with Path("log.txt").open("a") as log:
        log.write("two\n")
    with open("log.txt", "r+") as log:
        log.seek(4)
        log.write("TWO")
    return Path("log.txt").read_text(), os.path.getsize("log.txt")


def _make_if_missing() -> object:
    if not os.path.exists("cache.npy"):
        np.save("cache.npy", np.arange(3))
        made = True
    else:
        made = False
    os.mkdir("fresh")
    return made, np.load("cache.npy", mmap_mode="r").sum()


def _move_and_remove() -> object:
    Path("a.txt").write_text("a")
    shutil.copy("a.txt", "b.txt")
    Path("new").mkdir()
    Path("new/one.txt").write_text("1")
    shutil.copytree("new", "copied")
    shutil.move("copied", "moved")
    os.rename("b.txt", "c.txt")
    os.remove("a.txt")
    Path("moved/one.txt").unlink()
    os.remove("old.txt")
    os.rename("new", "taken")
    return sorted(os.listdir(".")), sorted(os.listdir("moved")), Path("taken/one.txt").read_text()


def _look_around() -> object:
    Path("deep/er").mkdir(parents=True)
    Path("deep/er/x.txt").touch()
    Path("deep/y.txt").write_text("y")
    walked = [(Path(top).name, sorted(folders), sorted(files)) for top, folders, files in os.walk("deep")]
    with os.scandir("deep") as entries:
        kinds = sorted((entry.name, entry.is_dir(), entry.stat().st_size > 0) for entry in entries if entry.is_file())
    found = (
        sorted(glob.glob("deep/**/*.txt", recursive=True)),
        sorted(str(path) for path in Path("deep").rglob("*.txt")),
    )
    os.chmod("deep/y.txt", 0o600)
    os.utime("deep/y.txt", (1, 1))
    return walked, kinds, found, Path("deep/y.txt").stat().st_mtime, Path("deep/er").is_dir(), os.access("no", os.R_OK)


def _remove_a_tree() -> object:
    shutil.rmtree("given")
    gone = not os.path.exists("given/old.txt")
    os.makedirs("given/new")
    os.rmdir("given/new")
    return gone, os.listdir("given")


def _pack_and_unpack() -> object:
    with bz2.open("log.bz2", "wb") as log:
        log.write(b"packed")
    with tarfile.open("all.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("empty.txt"))
    with tarfile.open("all.tar") as archive:
        names = archive.getnames()
    with bz2.open("log.bz2") as log:
        return log.read(), names


SCRIPTS = [
    _save_best_and_load_it,
    _log,
    _make_if_missing,
    _move_and_remove,
    _look_around,
    _remove_a_tree,
    _pack_and_unpack,
]


def _prepare(work: Path) -> None:
    (work / "given").mkdir()
    (work / "given" / "old.txt").write_text("old")
    (work / "old.txt").write_text("old")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_rank_sees_what_one_process_would(
    ranks: Ranks, tmp_path: Path, script: Callable[[], object], order: tuple[int, int]
) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    _prepare(alone)
    os.chdir(alone)
    expected = script()
    expected_files = _contents(alone)
    os.chdir(ranks.work)
    _prepare(ranks.work)
    for number in order:
        before = ranks.written()
        with ranks.rank(number):
            assert script() == expected
        if number:
            assert ranks.written() == before
    found = ranks.written()
    assert sorted(found) == sorted(expected_files)
    for name in found:
        if not name.endswith(".pt"):  # PyTorch writes the file's name into it
            assert found[name] == expected_files[name]


def test_a_rank_that_is_ahead_keeps_what_was_there(ranks: Ranks) -> None:
    _prepare(ranks.work)
    before = ranks.written()
    with ranks.rank(1):
        os.rename("given", "taken")
        os.rename("old.txt", "older.txt")
        assert Path("taken/old.txt").read_text() == Path("older.txt").read_text() == "old"
        assert sorted(os.listdir(".")) == ["older.txt", "taken"]
        shutil.rmtree("taken")
        assert os.listdir(".") == ["older.txt"]
    assert ranks.written() == before


def test_a_rank_that_is_behind_may_remove_and_rename_what_is_gone(ranks: Ranks) -> None:
    _prepare(ranks.work)
    for number in (0, 1):
        with ranks.rank(number):
            os.rename("old.txt", "older.txt")
            shutil.rmtree("given")
            assert Path("older.txt").read_text() == "old"
            assert os.listdir(".") == ["older.txt"]
            with pytest.raises(FileNotFoundError):
                shutil.rmtree("given")


def test_what_is_raised_names_the_scripts_path(ranks: Ranks) -> None:
    Path("there").mkdir()
    with ranks.rank(1):
        with pytest.raises(FileNotFoundError, match=r"missing\.txt"):
            Path("missing.txt").read_text()
        with pytest.raises(FileNotFoundError, match="no_such_folder"):
            Path("no_such_folder/x").write_text("x")
        with pytest.raises(FileExistsError, match="there"):
            os.mkdir("there")
        Path("x").write_text("x")
        with pytest.raises(FileExistsError):
            Path("x").touch(exist_ok=False)
        with pytest.raises(FileNotFoundError):
            os.remove("missing.txt")
        with pytest.raises(FileNotFoundError):
            os.listdir("missing")
        with pytest.raises(FileNotFoundError, match="missing"):
            os.rmdir("missing")
        os.makedirs("full/inner")
        with pytest.raises(OSError, match="not empty"):
            os.rmdir("full")
        with pytest.raises(IsADirectoryError):
            os.remove("full")


def test_a_rank_does_not_see_what_rank_0_has_made_until_it_makes_it_too(ranks: Ranks) -> None:
    Path("shared.txt").write_text("there before")
    with ranks.rank(0):
        Path("results").mkdir()
        Path("results/a.txt").write_text("a")
    with ranks.rank(1):
        assert not Path("results").exists()
        assert os.listdir(".") == ["shared.txt"]
        assert Path("shared.txt").read_text() == "there before"
        Path("results").mkdir()
        assert os.listdir("results") == []
        Path("results/a.txt").write_text("mine")
        assert Path("results/a.txt").read_text() == "mine"
    assert Path("results/a.txt").read_text() == "a"


def test_special_files_descriptors_and_scratch_are_left_alone(ranks: Ranks, tmp_path: Path) -> None:
    os.mkfifo("pipe")
    with ranks.rank(1):
        with open("/dev/null", "w") as null:
            null.write("nothing")
        read, write = os.pipe()
        with open(write, "w") as end:
            end.write("through")
        with open(read) as end:
            assert end.read() == "through"
        with open(tmp_path / "scratch" / "own.txt", "w") as own:
            own.write("kept")
        reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
        with open("pipe", "w") as pipe:
            pipe.write("piped")
        assert os.read(reader, 5) == b"piped"
        os.close(reader)
    assert (tmp_path / "scratch" / "own.txt").read_text() == "kept"


def test_temporary_files_are_real_ones(ranks: Ranks) -> None:
    with ranks.rank(1):
        with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile("w") as file:
            Path(folder, "x.txt").write_text("x")
            file.write("y")
            file.flush()
            found = subprocess.run(["cat", f"{folder}/x.txt", file.name], capture_output=True, text=True, check=True)
            assert found.stdout == "xy"
        assert not os.path.exists(folder)
        Path("out").mkdir()
        handle, name = tempfile.mkstemp(dir="out")
        os.close(handle)
        assert os.listdir("out") == [os.path.basename(name)]
    assert ranks.written() == {}


def test_everything_is_put_back(ranks: Ranks) -> None:
    def functions() -> list[object]:
        names = sorted(name for name in dir(os) if callable(getattr(os, name)))
        return [
            builtins.open,
            io.open,
            tarfile.bltn_open,  # type: ignore[attr-defined]
            shutil.rmtree,
            torch.save,
            tempfile.mkdtemp,
            *(getattr(os, name) for name in names),
        ]

    before, sets = functions(), [set(os.supports_dir_fd), set(os.supports_follow_symlinks)]
    with ranks.rank(1):
        assert functions() != before
    assert functions() == before
    assert [set(os.supports_dir_fd), set(os.supports_follow_symlinks)] == sets
