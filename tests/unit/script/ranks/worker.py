"""One rank of every check of `test_training`: ``worker.py FOLDER``.

Writes ``FOLDER/RANK.json``: for each check, what went wrong in this rank, or nothing. Started once, so that all checks
share one start-up. A check that hangs ends the rank with its traceback.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from manycard.cards.card import Card
from manycard.script.calls import Interception
from manycard.script.ranks.lockstep import CallCounts
from manycard.script.ranks.spreading import RankSpreading, Team
from manycard.script.spreading import SpreadSettings
from manycard.strategies.peers import Ranks
from tests.unit.script.ranks.checks import Rank
from tests.unit.script.ranks.state_checks import CHECKS

SECONDS_A_CHECK = 60


def main(folder: Path) -> None:
    """Run all checks."""
    torch.set_num_threads(1)
    rank, world, device = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.device("cpu")
    peers = Ranks(Card(rank, device))
    counts = CallCounts(folder / "calls", rank, world)
    team = Team(peers, device, counts, tuple(f"cpu:{position}" for position in range(world)))
    found: dict[str, str] = {}
    for name, check in CHECKS.items():
        faulthandler.dump_traceback_later(SECONDS_A_CHECK, exit=True)
        (folder / f"{rank}.running").write_text(name)
        torch.manual_seed(0)
        settings = SpreadSettings(
            lambda: [Card(position, device) for position in range(world)], sync_batchnorm=name.endswith("synced")
        )
        spreading = RankSpreading(settings, lambda: team)
        calls = Interception(spreading)
        try:
            with calls:
                check(Rank(rank, world, calls, spreading, peers))
            found[name] = ""
        except BaseException:
            found[name] = traceback.format_exc()
    faulthandler.cancel_dump_traceback_later()
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
