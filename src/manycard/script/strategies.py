"""What a strategy means for a script that doesn't use manycard, in this process.

    dp             its calls are spread over the cards (`ScriptSpreading`)
    single         it runs as it is, on one card; precision and memory format are the command line's (`OnOneCard`)
    another        needs a `Parallel` that follows it: refused at the first call of a trained module, before anything
                   is trained (`Unfollowed`)

That a script doesn't use manycard shows at its first call of a trained module. One whose own file deals with manycard,
or with ranks, is left alone: it may train something before it makes its `Parallel`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from manycard.errors import StrategyError
from manycard.launch import Script
from manycard.script.spreading import ScriptSpreading, SpreadSettings
from manycard.script.written_for_ranks import written_for_ranks

__all__ = ["OnOneCard", "Unfollowed", "UnfollowedError", "spreading_for"]


class UnfollowedError(StrategyError):
    """The strategy is one that a script follows by its `Parallel`, and this script makes none."""


class OnOneCard(ScriptSpreading):
    """Runs outermost calls on one card, because strategy ``single`` says so."""

    def describe(self) -> str:
        """One line: where it ran."""
        where = f", {self._names()}" if self.cards else ""
        return f"ran on one card{where}, as strategy single says; dp would spread it"


class Unfollowed(ScriptSpreading):
    """Refuses outermost calls, because nothing in the script follows the strategy.

    Args:
        settings: of calls; unused.
        script: what runs.
        strategy: what it was to follow.
    """

    def __init__(self, settings: SpreadSettings, script: Script, strategy: str) -> None:
        super().__init__(settings)
        self._script = script
        self._strategy = strategy

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plain: Callable[..., Any]
    ) -> NoReturn:
        raise UnfollowedError(
            "--strategy",
            self._strategy,
            f"{self._script.name} makes no mc.Parallel that could follow it",
            fix="give dp or ddp, which spread a script as it is, or single, which runs it on one card",
        )


def spreading_for(strategy: str | None, script: Script, settings: SpreadSettings) -> ScriptSpreading | None:
    """What handles the outermost calls of `script`, which doesn't use manycard; None where nothing is to."""
    if strategy in (None, "dp"):
        return ScriptSpreading(settings)
    if written_for_ranks(script):
        return None
    return OnOneCard(settings) if strategy == "single" else Unfollowed(settings, script, str(strategy))
