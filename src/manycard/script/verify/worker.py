"""One side of a verification, in a process of its own: ``python worker.py ORDERS``.

Behaviour:
    * ORDERS is a JSON file (`Orders`). The process runs the script and leaves a `Recording` in the orders' folder,
      under its rank's number, however the script ended.
    * With `Orders.ranks`, it starts one rank a card, each of which runs this same file; a rank that fails leaves a
      recording, and the first failure's traceback is in rank 0's place.
    * With `Orders.lockstep` each rank runs a script for one card, as ``manycard run --strategy ddp`` does
      (`manycard.script.ranks`), and records what it sees: whole batches, whole losses, whole gradients.
    * ``random``, NumPy and PyTorch are seeded with 0 before the script starts; what the script seeds itself wins.
    * The exit status is 0 whatever the script did: it was run, and this is what it showed.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path[0] = "/dev/null"  # for this file's folder, which no script should see, until the script's comes here

import contextlib
import json
import os
import random
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Orders", "work"]


@dataclass(frozen=True)
class Orders:
    """What one side is to do."""

    argv: tuple[str, ...]
    """The script and its arguments, as `Script.parse` reads them."""
    folder: str
    """Where the recording goes."""
    steps: int
    """Optimizer steps to record."""
    budget: int
    """Bytes of gradients and parameters a process may keep whole."""
    many: bool
    """Whether this is the side of many cards."""
    cards: str = ""
    """Cards of the side, as ``--cards`` writes them; empty for the script's own."""
    default_cards: str = "all"
    """Cards for a script that names none, where `cards` is empty."""
    strategy: str = ""
    """The strategy in place of the script's; empty for its own."""
    ranks: bool = False
    """Whether to run one process a card."""
    lockstep: tuple[str, ...] = ()
    """The names of the cards, where ranks are to run a script for one card in lockstep."""
    own_card: bool = False
    """Whether each of those sees its own card alone, as ``cuda:0``."""
    sync_batchnorm: bool = False
    stands_for: int = 1
    """How many ranks' batches this one rank gets."""

    def write(self, path: Path) -> None:
        """Write them."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Orders:
        """Read what `write` wrote."""
        words = json.loads(path.read_text(encoding="utf-8"))
        return cls(**(words | {name: tuple(words[name]) for name in ("argv", "lockstep")}))


def work(path: Path) -> None:
    """Do what the orders in `path` say."""
    orders = Orders.read(path)
    if orders.ranks and "RANK" not in os.environ:
        _launch(orders, path)
    else:
        _run(orders)


def _launch(orders: Orders, path: Path) -> None:
    from manycard.cards import choose_cards
    from manycard.errors import RankFailed
    from manycard.launch import launch_script
    from manycard.script.verify.recording import Recording

    cards = choose_cards(orders.cards or orders.default_cards).cards
    if not orders.many:
        cards = cards[:1]
    tempfile.tempdir = orders.folder  # where output of failed ranks is kept, no longer than the recordings
    environment = {"MANYCARD_STRATEGY": orders.strategy} if orders.strategy else {}
    try:
        launch_script([__file__, str(path)], cards, environment, own_card=orders.own_card)
    except RankFailed as failed:
        Recording(ended="failed", error=f"rank {failed.rank}:\n{failed.trace or failed}").write(
            Path(orders.folder) / "0"
        )


def _run(orders: Orders) -> None:
    from manycard.errors import NeedsRanks
    from manycard.launch import exit_status, own_traceback
    from manycard.parallel import Parallel
    from manycard.script.verify.recorder import RecordedEnough, Recorder
    from manycard.script.verify.standing_in import watching

    recorder = Recorder(orders.steps, orders.budget)
    run = _InLockstep(orders, recorder) if orders.lockstep else _InPlace(orders, recorder)
    asked: list[tuple[str, str]] = []
    known: dict[str, Any] = {"ended": "script"}
    _seed()
    with (
        _asking(Parallel, asked, orders),
        watching(
            recorder,
            on_manycard=lambda: None,
            drop_in_cards=_drop_in_cards(orders),
            ranks=orders.stands_for,
            one_card=not orders.many,
        ),
    ):
        try:
            run()
        except RecordedEnough:
            known["ended"] = "steps"
            run.end()
        except NeedsRanks:
            known |= {"ended": "ranks", "asks_for": asked[-1] if asked else ("ddp", "all")}
        except SystemExit as request:
            status, text = exit_status(request)
            if status:
                known |= {"ended": "failed", "error": text or f"the script exited with status {status}"}
        except BaseException as error:
            if "RANK" in os.environ:
                raise  # the launcher finds out whose failure was the first
            trace = traceback.format_exception(error.with_traceback(own_traceback(error)))
            known |= {"ended": "failed", "error": "".join(trace)}
    if not recorder.facts["uses_manycard"]:
        known |= run.spread()
    recorder.recording(**known).write(Path(orders.folder) / os.environ.get("RANK", "0"))


class _InPlace:
    """The script runs in this process as it is, or spread over the cards of this process."""

    def __init__(self, orders: Orders, recorder: Any) -> None:
        self.orders = orders
        self.recorder = recorder
        self.spreading: Any = None

    def __call__(self) -> None:
        from manycard.launch import Script
        from manycard.script.calls import Interception

        with Interception(self.record(_spreading(self.orders))):
            Script.parse(self.orders.argv).run()

    def record(self, spreading: Any) -> Any:
        """What records outermost calls, and hands them to `spreading`."""
        from manycard.script.verify.recorder import RecordingHandler

        self.spreading = spreading
        return RecordingHandler(self.recorder, spreading, one_card=not self.orders.many)

    def end(self) -> None:
        """The script was stopped, because all steps are recorded."""

    def spread(self) -> dict[str, Any]:
        """What became of the modules of a script that doesn't use manycard."""
        if self.spreading is None:
            return {}
        self.recorder.cards = self.cards()
        return {"spread": tuple(asdict(report) for report in self.spreading.reports)}

    def cards(self) -> tuple[str, ...]:
        """The names of the cards that were used."""
        return tuple(map(str, self.spreading.cards))


class _InLockstep(_InPlace):
    """The script runs in this rank in lockstep with the others."""

    def __call__(self) -> None:
        from manycard.launch import Script
        from manycard.script.ranks.main import RankSettings, run_in_rank

        settings = RankSettings(
            self.orders.lockstep, seed=0, own_card=self.orders.own_card, sync_batchnorm=self.orders.sync_batchnorm
        )
        folder = Path(os.environ["MANYCARD_RANK_FOLDER"])
        run_in_rank(settings, Script.parse(self.orders.argv), folder, self.record, [self.orders.folder])

    def end(self) -> None:
        """Wait for the other ranks, which may still be in their last call."""
        if self.spreading.team is not None:
            self.spreading.team.counts.end()

    def spread(self) -> dict[str, Any]:
        """What became of the script's modules."""
        return super().spread() | {"in_lockstep": True}

    def cards(self) -> tuple[str, ...]:
        """The names of the cards of all ranks."""
        return self.spreading.team.names if self.spreading.team is not None else ()


def _spreading(orders: Orders) -> Any:
    """What spreads a script that doesn't use manycard; None where nothing is to."""
    from manycard.cards import choose_cards
    from manycard.script.spreading import ScriptSpreading, SpreadSettings

    if not orders.many or "RANK" in os.environ or orders.strategy not in ("", "dp"):
        return None
    return ScriptSpreading(
        SpreadSettings(
            choose=lambda: choose_cards(orders.cards or orders.default_cards).cards,
            sync_batchnorm=orders.sync_batchnorm,
        )
    )


def _drop_in_cards(orders: Orders) -> Callable[[Any], Any] | None:
    """The cards of a `DataParallel`, from those it chose."""
    from manycard.cards import choose_cards

    if not orders.many:
        return lambda cards: cards[:1]
    if orders.cards:
        return lambda cards: choose_cards(orders.cards).cards
    return None


@contextlib.contextmanager
def _asking(parallel: Any, asked: list[tuple[str, str]], orders: Orders) -> Iterator[None]:
    """Note what strategy and cards a `Parallel` is asked for, and give it the orders' BatchNorm."""
    original = parallel.__init__

    def note_and_make(made: Any, strategy: str = "dp", **settings: Any) -> None:
        cards = settings.get("cards", "all")
        if not isinstance(cards, (str, int)):
            cards = ",".join(map(str, cards)) + ("," if len(cards) == 1 else "")
        asked.append((strategy, str(cards)))
        if orders.sync_batchnorm and orders.many:
            settings["sync_batchnorm"] = True
        original(made, strategy, **settings)

    parallel.__init__ = note_and_make
    try:
        yield
    finally:
        parallel.__init__ = original


def _seed() -> None:
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


if __name__ == "__main__":
    root = str(Path(__file__).resolve().parents[3])
    if root not in sys.path:  # whoever started this may have found manycard by a path of its own
        sys.path.append(root)
    from manycard.script.verify.worker import work as _work

    _work(Path(sys.argv[1]))
