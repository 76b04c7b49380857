"""Rows of images/s, and the advice that follows from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchvision", reason="images need the extra vision")
pytest.importorskip("sklearn", reason="the photographs come with scikit-learn")

from manycard.benchmark.data import ReadingSettings, make_photographs, measure_reading
from manycard.benchmark.data.reading import advise
from manycard.errors import SettingError


def row(backend: str, workers: int, speed: float | None) -> dict[str, Any]:
    return {"backend": backend, "workers": workers, "images_per_s": speed, "error": None if speed else "broken"}


ROWS = [row("threads", 1, 500), row("threads", 4, 1900), row("dali", 4, 2000), row("card", 4, None)]


@pytest.mark.parametrize(
    ("needed", "backend", "workers", "said"),
    [
        (None, "dali", 4, "the fastest, 2,000"),
        (400, "threads", 1, "will not wait"),
        (480, "dali", 4, "will not wait"),
        (1750, "dali", 4, "will not wait"),
        (4000, "dali", 4, "50% of the 4,000"),
    ],
)
def test_advice(needed: float | None, backend: str, workers: int, said: str) -> None:
    use, words = advise(ROWS, needed)
    assert use == {"backend": backend, "workers": workers}
    assert said in words


def test_no_advice_where_nothing_works() -> None:
    assert advise([row("threads", 1, None)], 100)[0] is None


def test_rows_are_measured(tmp_path: Path) -> None:
    make_photographs(tmp_path, 16, 50)
    settings = ReadingSettings(
        tmp_path, size=32, batch=8, backends=("threads",), workers=(1, 2), rounds=2, seconds=0.05
    )
    document = measure_reading(settings)
    assert [(each["backend"], each["workers"]) for each in document["rows"]] == [("threads", 1), ("threads", 2)]
    for each in document["rows"]:
        assert len(each["all_rounds"]) == 2
        assert min(each["all_rounds"]) <= each["images_per_s"] + 0.1
        assert each["images_per_s"] <= max(each["all_rounds"]) + 0.1
    assert document["images"] == 16
    assert document["use"]["backend"] == "threads"


def test_bad_images_are_no_speed(tmp_path: Path) -> None:
    """A backend that decodes nothing is fast, and must not win."""
    for number in range(8):
        (tmp_path / f"{number}.jpg").write_bytes(b"hello")
    document = measure_reading(
        ReadingSettings(tmp_path, size=32, batch=8, backends=("threads",), rounds=1, workers=(1,))
    )
    assert document["use"] is None
    assert "no image" in document["rows"][0]["error"]


def test_impossible_settings_are_refused(tmp_path: Path) -> None:
    for settings in ({"folder": tmp_path / "gone"}, {"backends": ("opencv",)}, {"workers": (0,)}, {"needed": -1.0}):
        with pytest.raises(SettingError):
            ReadingSettings(**{"folder": tmp_path, **settings})  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"no image in it.*--make"):
        measure_reading(ReadingSettings(tmp_path))
