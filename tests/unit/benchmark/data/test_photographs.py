"""Photographs that are written are JPEGs of the wanted kind and size, the same ones each time."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="the photographs come with scikit-learn")
pytest.importorskip("PIL", reason="JPEGs are written by Pillow")

from PIL import Image

from manycard.benchmark.data import make_photographs


@pytest.mark.parametrize("kilobytes", [50, 110])
def test_size_and_format(kilobytes: float, tmp_path: Path) -> None:
    made = make_photographs(tmp_path / "new", 40, kilobytes)
    files = sorted((tmp_path / "new").rglob("*.jpg"))
    assert made["images"] == len(files) == 40
    assert len({file.parent for file in files}) == 10
    sizes = [file.stat().st_size for file in files]
    assert made["mean_kilobytes"] == pytest.approx(sum(sizes) / 40_000, abs=0.06)
    assert abs(sum(sizes) / 40_000 / kilobytes - 1) < 0.1
    for file in files:
        image = Image.open(file)
        assert (image.format, image.size, image.mode) == ("JPEG", (500, 375), "RGB")
        image.load()


def test_the_same_ones_each_time(tmp_path: Path) -> None:
    contents = []
    for name in ("one", "two"):
        make_photographs(tmp_path / name, 5, 50)
        contents.append([file.read_bytes() for file in sorted((tmp_path / name).rglob("*.jpg"))])
    assert contents[0] == contents[1]
    assert len(set(contents[0])) == 5
