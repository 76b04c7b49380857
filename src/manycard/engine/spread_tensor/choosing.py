"""Which outputs stay spread."""

from __future__ import annotations

from manycard.errors import SettingError

__all__ = ["OUTPUTS", "least_bytes"]

OUTPUTS = ("auto", "spread", "gathered")
"""Large ones, all, or none."""
_LARGE = 32 << 20
"""Bytes from which on ``"auto"`` leaves an output spread.

Gathering so much over NVLink (about 400 GB/s) takes some 80 us, about as long as handing a loss to the cards' threads.
"""


def least_bytes(outputs: str, setting: str = "outputs") -> int | None:
    """The size from which on outputs stay spread; None where none does.

    Args:
        setting: what the user calls it.

    Raises:
        SettingError: there is no such choice.
    """
    if outputs not in OUTPUTS:
        raise SettingError(setting, outputs, "there is no such choice", fix="write auto, spread or gathered")
    return {"auto": _LARGE, "spread": 0, "gathered": None}[outputs]
