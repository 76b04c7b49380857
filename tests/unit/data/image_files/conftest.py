"""Photographs on disk, made once: parts of scikit-learn's two, so that nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchvision", reason="images need the extra vision")
pytest.importorskip("sklearn", reason="the photographs come with scikit-learn")

from manycard.benchmark.data import make_photographs


@pytest.fixture(scope="session")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 JPEGs of 500 x 375 in ten classes."""
    folder = tmp_path_factory.mktemp("photographs")
    make_photographs(folder, 24, 50)
    return folder


@pytest.fixture(scope="session")
def paths(photographs: Path) -> list[str]:
    """Their paths, sorted."""
    return sorted(str(path) for path in photographs.rglob("*.jpg"))
