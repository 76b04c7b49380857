from __future__ import annotations

from collections.abc import Iterator

import pytest

from .runs import Runs


@pytest.fixture(scope="package")
def runs() -> Iterator[Runs]:
    """Runs corpus scripts, plainly and spread."""
    made = Runs()
    try:
        yield made
    finally:
        made.close()
