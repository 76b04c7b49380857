"""Proving that many cards compute what one card computes: the script runs twice, and the runs are compared.

Behaviour:
    * Each run has a process of its own, the same seeds and hash seed, and ends after the steps asked for. What it
      prints is hidden; what the script itself writes (checkpoints, logs) is written.
    * A script that doesn't use manycard is spread as ``manycard run`` does, over the cards of one process or, with
      strategy ``ddp``, over ranks in lockstep. One that uses `Parallel` or `DataParallel` runs in strategy ``single``
      and in its own, or in that asked for. One for torchrun runs in one rank and in one a card; the one rank gets
      what all ranks get together, where a DistributedSampler deals it out.
    * A script that fails in one of the runs raises `ScriptFailedError` with its traceback.
    * Ctrl-C ends the run with everything it started.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from manycard.cards import Card, choose_cards
from manycard.errors import CardsError, ManycardError, SettingError, StrategyError
from manycard.launch import Script, cards_setting, end_family
from manycard.script.verify import worker
from manycard.script.verify.comparing import Report, compare
from manycard.script.verify.recording import Recording
from manycard.script.verify.worker import Orders
from manycard.script.written_for_ranks import written_for_ranks
from manycard.strategies import STRATEGIES

__all__ = ["ScriptFailedError", "VerifySettings", "verify"]

TORCHRUN = "torchrun"
_BUDGET = 256 * 2**20
"""Bytes of gradients and parameters that the processes of one side keep whole, together."""
_FOR_RANKS = re.compile(r"\b(init_process_group|DistributedDataParallel|DistributedSampler)\b")
_MANYCARD = re.compile(r"^\s*(import|from)\s+manycard\b", re.MULTILINE)
_SETTINGS = ("MANYCARD_STRATEGY", "MANYCARD_CARDS", "MANYCARD_PRECISION", "RANK", "WORLD_SIZE", "LOCAL_RANK")


class ScriptFailedError(ManycardError):
    """The script failed in one of the runs.

    Args:
        side: which one, such as ``on one card``.
        trace: its traceback.
    """

    def __init__(self, name: str, side: str, trace: str) -> None:
        super().__init__(f"{name} failed {side}, so there is nothing to compare")
        self.trace = trace


@dataclass(frozen=True)
class VerifySettings:
    """What is to be verified."""

    script: Script
    steps: int = 20
    """Optimizer steps to compare."""
    cards: str | None = None
    """As ``--cards``; None for the script's own or all."""
    strategy: str | None = None
    """A strategy, ``torchrun``, or None for the script's own."""
    sync_batchnorm: bool = False

    def __post_init__(self) -> None:
        self.script.check()
        if self.steps < 1:
            raise SettingError("--steps", self.steps, "it must be at least 1", fix="leave it out for 20")
        known = [TORCHRUN, *(name for name in STRATEGIES if name != "single")]
        if self.strategy is not None and self.strategy not in known:
            raise StrategyError(
                "--strategy",
                self.strategy,
                "there is no such strategy to verify",
                fix=f"choose one of {', '.join(known)}",
            )
        if self.sync_batchnorm and self.for_ranks:
            raise SettingError(
                "--sync-batchnorm",
                True,
                "a script for torchrun converts its BatchNorm itself",
                fix="call nn.SyncBatchNorm.convert_sync_batchnorm in the script",
            )

    @property
    def for_ranks(self) -> bool:
        """Whether the script is one for torchrun."""
        if self.strategy is not None:
            return self.strategy == TORCHRUN
        if self.script.is_module:
            return False
        source = Path(self.script.name).read_text(encoding="utf-8", errors="replace")
        return bool(_FOR_RANKS.search(source)) and not _MANYCARD.search(source)


def verify(settings: VerifySettings, say: Callable[[str], None] = lambda text: None) -> Report:
    """Run the script on one card and on many, and compare.

    Args:
        say: called with what is being done.

    Raises:
        SettingError: a setting has a value that can't work; some are found out by running.
        ScriptFailedError: the script failed.
    """
    cards = _choose(settings.cards, say)
    if len(cards) < 2:
        raise CardsError(
            "--cards",
            settings.cards or "all",
            "there is one card, and nothing to compare it with",
            fix="give two or more, such as --cards cpu:2",
        )
    with tempfile.TemporaryDirectory(prefix="manycard-verify-") as folder:
        if settings.for_ranks:
            return _Runs(settings, cards, Path(folder), say).for_ranks()
        return _Runs(settings, cards, Path(folder), say).in_place()


def _choose(spec: str | None, say: Callable[[str], None]) -> tuple[Card, ...]:
    choice = choose_cards(spec or "all")
    if spec is None and len(choice.cards) == 1 and choice.cards[0].simulated:
        say("there is no GPU, so two cards are simulated on the CPU (--cards cpu:2)")
        return choose_cards("cpu:2").cards
    if spec is not None and choice.describe():
        say(choice.describe())
    return choice.cards


@dataclass(frozen=True)
class _Runs:
    """The two runs of one verification."""

    settings: VerifySettings
    cards: tuple[Card, ...]
    folder: Path
    say: Callable[[str], None]

    def in_place(self) -> Report:
        """A script that manycard spreads, or one that uses it."""
        settings = self.settings
        given = cards_setting(self.cards) if settings.cards is not None else ""
        one = self._one(self._record(self._orders("one", cards=given, strategy="single")))
        strategy = settings.strategy or ""
        orders = self._orders("many", cards=given, strategy=strategy, many=True)
        if strategy and STRATEGIES[strategy].ranks:
            orders = replace(orders, ranks=True)
            if not written_for_ranks(settings.script):
                own_card = all(card.uuid for card in self.cards)
                orders = replace(orders, lockstep=tuple(map(str, self.cards)), own_card=own_card)
        ranks = self._record(orders)
        if ranks[0].ended == "ranks":
            strategy, wanted = ranks[0].asks_for
            orders = replace(orders, folder=f"{orders.folder}-ranks", strategy=strategy, ranks=True)
            ranks = self._record(replace(orders, default_cards=wanted))
        self._check(ranks[0], strategy)
        return compare(one, ranks, max(len(ranks), len(ranks[0].cards)))

    def for_ranks(self) -> Report:
        """A script for torchrun."""
        cards = cards_setting(self.cards)
        ranks = self._record(self._orders("many", cards=cards, many=True, ranks=True))
        alone = self._orders("one", cards=cards, ranks=True, stands_for=len(ranks))
        one = self._one(self._record(alone))
        if one.steps and ranks[0].steps and one.steps[0].samples == ranks[0].steps[0].samples * len(ranks) ** 2:
            # The script itself divides its batch by the number of ranks.
            again = replace(alone, stands_for=1, folder=f"{alone.folder}-again")
            one = self._one(self._record(again))
        named = tuple(map(str, self.cards))
        return compare(one, [replace(rank, cards=named) for rank in ranks], len(ranks))

    def _orders(self, side: str, **chosen: object) -> Orders:
        orders = Orders(
            tuple(self.settings.script.argv),
            str(self.folder / side),
            self.settings.steps,
            _BUDGET // len(self.cards),
            many=False,
            default_cards=cards_setting(self.cards),
            sync_batchnorm=self.settings.sync_batchnorm,
        )
        return replace(orders, **chosen)  # type: ignore[arg-type]

    def _one(self, ranks: list[Recording]) -> Recording:
        (one,) = ranks
        if not one.steps:
            raise ManycardError(
                f"{self.settings.script.name} ended without an optimizer step or a backward pass",
                fix="give it the arguments with which it trains",
            )
        return one

    def _check(self, first: Recording, strategy: str) -> None:
        """Refuse runs on many cards that were none."""
        if strategy not in ("", "dp") and not (first.uses_manycard or first.in_lockstep):
            raise StrategyError(
                "--strategy",
                strategy,
                f"{self.settings.script.name} makes no mc.Parallel that could follow it",
                fix="leave --strategy out, or give dp or ddp, or torchrun for a script with DistributedDataParallel",
            )
        if first.uses_manycard and len(first.cards) < 2:
            raise CardsError(
                "cards",
                ", ".join(first.cards),
                f"{self.settings.script.name} chose one card",
                fix="give two or more, such as --cards cpu:2",
            )

    def _record(self, orders: Orders) -> list[Recording]:
        """Run one side; gives the recording of each of its processes."""
        # A script of manycard's may choose cards of its own.
        many = f"on {len(self.cards)} cards" if self.settings.cards else "on many cards"
        side = many if orders.many else "on one card"
        self.say(f"running {self.settings.script.name} {side}, {orders.steps} steps at most")
        folder = Path(orders.folder)
        folder.mkdir()
        orders.write(folder / "orders.json")
        with (folder / "log").open("wb") as log:
            _wait_for(_start(orders, folder, log.fileno()))
        count = sum(1 for _ in folder.glob("*/recording.json"))
        recordings = [Recording.read(folder / str(rank)) for rank in range(count)] if count else []
        failed = next((recording for recording in recordings if recording.ended == "failed"), None)
        if failed is not None or not recordings:
            text = (folder / "log").read_text(encoding="utf-8", errors="replace")[-4000:]
            raise ScriptFailedError(self.settings.script.name, side, failed.error if failed else text)
        return recordings


def _start(orders: Orders, folder: Path, log: int) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
    environment["PYTHONHASHSEED"] = "0"
    if orders.strategy:
        environment["MANYCARD_STRATEGY"] = orders.strategy
    if orders.cards:
        environment["MANYCARD_CARDS"] = orders.cards
    if "MANYCARD_PRECISION" in os.environ:
        environment["MANYCARD_PRECISION"] = os.environ["MANYCARD_PRECISION"]
    return subprocess.Popen(
        [sys.executable, worker.__file__, str(folder / "orders.json")],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
        start_new_session=True,  # Ctrl-C reaches the caller alone, which then ends the run in order
    )


def _wait_for(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait()
    except BaseException:
        end_family(process)
        raise
