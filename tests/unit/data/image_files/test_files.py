"""Files that are in memory, and files that have to be waited for: the same bytes, the same order, bad ones named."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from manycard.data.image_files.augment import RandomResizedCrop
from manycard.data.image_files.backends import files
from manycard.data.image_files.backends.files import FileReader, Prepared
from manycard.data.image_files.recipe import Recipe, Request
from tests.unit.data.image_files import odd

RECIPE = Recipe((16, 16), RandomResizedCrop())


@pytest.fixture(params=[True, False], ids=["in memory", "waited for"])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether files are found in the system's memory."""
    if not request.param:
        monkeypatch.setattr(files, "_AT_ONCE", None)
    return bool(request.param)


def test_every_file_in_its_place(at_once: bool, paths: list[str], tmp_path: Path) -> None:
    other = odd.write("cmyk", tmp_path)[0]
    (tmp_path / "cut.jpg").write_bytes(Path(paths[0]).read_bytes()[:5_000])
    (tmp_path / "empty.jpg").touch()
    asked = [
        paths[0],
        str(tmp_path / "cut.jpg"),
        other,
        str(tmp_path / "none.jpg"),
        str(tmp_path / "empty.jpg"),
        paths[1],
    ]
    reader = FileReader(RECIPE, 2, pin=False)
    requests = [Request(path, seed) for seed, path in enumerate(asked)]
    begun = [reader.begin(requests), reader.begin(requests[::-1])]
    first, second = (each.result() for each in begun)
    reader.close()
    for found in (first, second[::-1]):
        assert isinstance(found[1], str)
        assert "cut off" in found[1]
        assert found[3] == "it can't be read (No such file or directory)"
        assert isinstance(found[4], str)
        for row in (0, 5):
            prepared = found[row]
            assert isinstance(prepared, Prepared)
            assert prepared.encoded is not None
            assert prepared.encoded.tensor().numpy().tobytes() == Path(asked[row]).read_bytes()
        assert isinstance(found[2], Prepared)
        assert found[2].decoded is not None
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("manycard-files")]


def test_a_file_that_shrinks_is_bad(paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "one.jpg"
    path.write_bytes(Path(paths[0]).read_bytes())
    monkeypatch.setattr(files, "_size", lambda path: Path(path).stat().st_size + 10)
    reader = FileReader(RECIPE, 2, pin=False)
    assert reader.begin([Request(str(path), 0)]).result() == ["it became shorter while it was read"]
    reader.close()
