"""Spreading in a live session: a notebook, an interactive shell, or a part of a script."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from manycard.cards import choose_cards
from manycard.errors import SettingError
from manycard.script.calls import Interception
from manycard.script.precision import call_context, refuse_unscaled
from manycard.script.spreading import ScriptSpreading, SpreadSettings

__all__ = ["Spread", "spread"]

_running: list[Spread] = []


class Spread:
    """Spreading that goes on until `stop`; also a context manager.

    Args:
        settings: the cards, and how.
    """

    def __init__(self, settings: SpreadSettings) -> None:
        self._spreading = ScriptSpreading(settings)
        self._calls = Interception(self._spreading)
        self._calls.__enter__()
        _running.append(self)

    def describe(self) -> str:
        """One line: what was spread so far, over which cards, and how fast."""
        return self._spreading.describe()

    def stop(self) -> None:
        """Let modules run as they did before. Trained parameters are the module's own and stay."""
        if self in _running:
            _running.remove(self)
            self._calls.__exit__()
            self._spreading.close()

    def __enter__(self) -> Spread:
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()


def spread(
    cards: str | int | Sequence[int] = "all", *, precision: str = "default", sync_batchnorm: bool = False
) -> Spread:
    """Spread every call of a trained module over the cards from now on, in this process.

    What ``manycard run`` does for an unmodified script, for a session that is already running: ordinary code goes on,
    and each outermost call of a module with parameters that require gradients is cut over the cards and joined. The
    first calls are compared with one card; what can't be cut stays on one card, which is said.

    Args:
        cards: as for `Parallel`: ``all``, ``auto``, a count, a list of torch's indices, or ``cpu:N``.
        precision: of the spread calls: ``default``, ``fp32``, ``tf32``, ``bf16`` (outputs come back as fp32).
        sync_batchnorm: BatchNorm statistics over the whole batch.

    Returns:
        A handle: ``describe()`` says what was spread, ``stop()`` ends it.

    Raises:
        SettingError: `precision` can't be used so, or spreading is on already.
        CardsError: a card isn't there.

    Example:
        >>> spreading = spread("cpu:2")
        >>> model = torch.nn.Linear(4, 2)
        >>> model(torch.ones(6, 4)).shape
        torch.Size([6, 2])
        >>> spreading.stop()
    """
    if _running:
        raise SettingError("cards", cards, "calls are being spread already", fix="call stop() on what spread() gave")
    chosen = choose_cards(cards)
    refuse_unscaled(precision, "precision")
    said = chosen.describe()
    if said:
        print(f"manycard: {said}", file=sys.stderr)
    return Spread(
        SpreadSettings(
            choose=lambda: chosen.cards,
            sync_batchnorm=sync_batchnorm,
            autocast=call_context(precision, "precision"),
        )
    )


def load_ipython_extension(shell: object) -> None:
    """``%load_ext manycard``: spread over all cards from now on."""
    if not _running:
        spread()


def unload_ipython_extension(shell: object) -> None:
    """``%unload_ext manycard``: stop."""
    while _running:
        _running[-1].stop()
