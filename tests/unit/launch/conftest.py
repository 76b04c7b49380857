from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.launch.processes import Playground, playground


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Playground]:
    """A playground that is also this process's: its ranks are marked, its temporary files are seen."""
    with playground(tmp_path) as made:
        for name, value in made.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(tempfile, "tempdir", str(made.temporary))
        monkeypatch.chdir(made.folder)
        yield made
