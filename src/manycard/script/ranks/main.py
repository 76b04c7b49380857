"""What runs in each rank of an unmodified script: ``python -m manycard.script.ranks.main SETTINGS SCRIPT [ARGS]...``.

Behaviour:
    * The script sees what it sees under ``python``: its arguments, `__main__`, ``sys.path[0]``; what it raises leaves
      with its own frames first. It runs in every rank, from equal random states, and no variable tells it so.
    * Outermost calls of modules that it trains are spread (`RankSpreading`); files that ranks above 0 write go to an
      overlay (`manycard.script.files.overlay`).
    * When it has ended, ranks wait for one another, and rank 0 says what was spread.
    * A script that uses manycard itself is left alone from then on.

SETTINGS is a `RankSettings` as JSON. The rank's folder, which the launcher removes, is in MANYCARD_RANK_FOLDER.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from manycard.cards.card import Card
from manycard.engine.data_parallel import DataParallel
from manycard.errors import StrategyError
from manycard.launch import Script, exit_status
from manycard.parallel import Parallel
from manycard.parallel.profiling import VARIABLE, begin_from_environment
from manycard.script.calls import Handler, Interception
from manycard.script.files.calls import stand_in
from manycard.script.files.journal import Journal, JournaledFiles
from manycard.script.files.overlay import OverlayFiles, shared
from manycard.script.noticing import noticing
from manycard.script.precision import call_context
from manycard.script.ranks.environment import RankVariables
from manycard.script.ranks.lockstep import CallCounts
from manycard.script.ranks.spreading import RankSpreading, Team
from manycard.script.spreading import SpreadSettings
from manycard.strategies.peers import Ranks

__all__ = ["RankSettings", "run_in_rank"]


@dataclass(frozen=True)
class RankSettings:
    """How an unmodified script is run in ranks; the same in each of them."""

    cards: tuple[str, ...]
    """The names of the cards, by rank."""
    seed: int
    """What Python, NumPy and PyTorch are seeded with before the script starts."""
    own_card: bool = False
    """Whether each process sees its own card alone, as ``cuda:0``."""
    precision: str | None = None
    """As ``--precision``; None where it was not given."""
    sync_batchnorm: bool = False
    """BatchNorm statistics over the whole batch."""
    compile: bool = False
    """Compile the module in each rank."""
    channels_last: bool = False
    """Keep convolutions' weights and 4-dimensional inputs in channels-last memory format."""
    report: str = ""
    """Where rank 0 leaves what was spread, as JSON; empty for nowhere."""

    @classmethod
    def read(cls, word: str) -> RankSettings:
        """Read what `word` gives."""
        values = json.loads(word)
        return cls(**{**values, "cards": tuple(values["cards"])})

    @property
    def word(self) -> str:
        """All of it in one word of a command line."""
        return json.dumps(asdict(self))

    @property
    def simulated(self) -> bool:
        """Whether the CPU plays the cards."""
        return self.cards[0].startswith("cpu")


def run_in_rank(
    settings: RankSettings,
    script: Script,
    folder: Path,
    around: Callable[[RankSpreading], Handler] = lambda spreading: spreading,
    left_alone: Sequence[str] = (),
) -> None:
    """Run `script` in this rank; what it raises leaves as it is.

    Args:
        folder: this rank's; rank 0's is ``0`` beside it.
        around: gives what handles the script's outermost calls, from what spreads them.
        left_alone: folders in which every rank writes the real files.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    variables = RankVariables()
    _seed(settings.seed)
    let_files_be = _own_files(rank, folder, left_alone)

    def device() -> torch.device:
        return torch.device("cpu") if settings.simulated else torch.device("cuda", torch.cuda.current_device())

    def cards() -> Sequence[Card]:
        return [Card(position, device()) for position in range(world)]

    def join() -> Team:
        with variables.shown():
            peers = Ranks(Card(rank, device()))
        return Team(peers, device(), CallCounts(folder.parent / "0" / "calls", rank, world), settings.cards)

    spreading = RankSpreading(_spread_settings(settings, cards), join)
    with Interception(around(spreading)) as calls:

        def leave_alone() -> None:
            calls.stop()
            let_files_be()
            variables.put_back()
            _check_sees_all_cards(settings)

        with noticing(Parallel, DataParallel, then=leave_alone) as made:
            ended: SystemExit | None = None
            try:
                script.run()
            except SystemExit as request:
                if exit_status(request)[0] != 0:
                    raise
                ended = request
            finally:
                variables.put_back()
    if not made:
        _finish(spreading, settings, rank)
    if ended is not None:
        raise ended


def _finish(spreading: RankSpreading, settings: RankSettings, rank: int) -> None:
    if spreading.team is not None:
        spreading.team.counts.end()
    if rank == 0:
        sys.stdout.flush()
        print(f"manycard: {spreading.describe()}", file=sys.stderr, flush=True)
        if settings.report:
            reports = [dataclasses.asdict(report) for report in spreading.reports]
            Path(settings.report).write_text(json.dumps(reports), encoding="utf-8")


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _own_files(rank: int, folder: Path, left_alone: Sequence[str]) -> Callable[[], None]:
    """Keep this rank's files apart; gives the function that ends it."""
    journal = Journal(folder.parent / "0" / "journal")
    if rank == 0:
        return stand_in(JournaledFiles(journal), reads=False)
    (folder / "files").mkdir(exist_ok=True)
    os.environ["WANDB_MODE"] = "disabled"  # it writes, and speaks, by itself
    alone = [*shared(), str(folder.parent), sys.prefix, *left_alone]
    return stand_in(OverlayFiles(folder / "files", journal, alone), reads=True)


def _spread_settings(settings: RankSettings, cards: Callable[[], Sequence[Card]]) -> SpreadSettings:
    return SpreadSettings(
        choose=cards,
        sync_batchnorm=settings.sync_batchnorm,
        autocast=call_context(settings.precision),
        compile=settings.compile,
        channels_last=settings.channels_last,
    )


def _check_sees_all_cards(settings: RankSettings) -> None:
    if settings.own_card:
        raise StrategyError(
            "--strategy",
            "ddp",
            "a module that the script imports uses manycard, and each rank has been started with its own card alone",
            fix="write `import manycard` in the script itself, so that it is seen before ranks are started",
        )


def _profiled(settings: RankSettings) -> list[str]:
    """Begin what ``manycard profile`` asks for; the folder where every rank writes its trace."""
    rank = int(os.environ["RANK"])
    begin_from_environment(None, [settings.cards[rank]], rank)
    asked = os.environ.get(VARIABLE)
    return [json.loads(asked)["out"]] if asked else []


if __name__ == "__main__":
    asked_for = RankSettings.read(sys.argv[1])
    run_in_rank(
        asked_for,
        Script.parse(sys.argv[2:]),
        Path(os.environ["MANYCARD_RANK_FOLDER"]),
        left_alone=_profiled(asked_for),
    )
