"""Real cards: every test here is skipped where there is none; a case on more cards than there are is not made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder."""
    here = [item for item in items if "tests/gpu" in item.path.as_posix()]
    for item in here:
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"))


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """TF32 off: the comparisons are of fp32."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
