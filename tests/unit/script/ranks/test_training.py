"""Calls spread over ranks give what plain PyTorch gives; all checks run in one launch of three ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manycard.cards import choose_cards
from manycard.errors import RankFailed
from manycard.launch import launch_script

from .state_checks import CHECKS

RANKS = 3
WORKER = Path(__file__).with_name("worker.py")

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What went wrong in each check, by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    try:
        launch_script([str(WORKER), str(folder)], choose_cards(f"cpu:{RANKS}").cards, {"OMP_NUM_THREADS": "1"})
    except RankFailed as failed:
        running = {path.stem: path.read_text() for path in sorted(folder.glob("*.running"))}
        pytest.fail(f"{failed}\nwhile running {running}\n{failed.trace}")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("name", CHECKS)
def test_ranks(found: list[dict[str, str]], name: str) -> None:
    for rank, of_rank in enumerate(found):
        assert of_rank[name] == "", f"rank {rank}:\n{of_rank[name]}"
