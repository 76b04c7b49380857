"""The precision of an unmodified script's outermost calls.

The script has its own backward pass and optimizer, so that what its precision needs outside of the calls is its own
part. ``bf16`` needs nothing, ``fp32`` and ``tf32`` are flags. ``fp16`` needs loss scaling: refused, rather than
trained with gradients that vanish. Whether a script is unmodified shows at its first call of a trained module, and one
that uses `Parallel` may have ``fp16``, so that the refusal waits for that call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from manycard.errors import SettingError
from manycard.precision import make_precision

__all__ = ["UnscaledPrecisionError", "call_context", "refuse_unscaled"]


class UnscaledPrecisionError(SettingError):
    """The precision needs a loss scale, which nobody applies to an unmodified script's loss."""


def refuse_unscaled(name: str | None, setting: str) -> None:
    """Refuse a precision that needs more than the calls of an unmodified script.

    Args:
        name: of a precision; None for the default.
        setting: what the user has set, for the error.

    Raises:
        UnscaledPrecisionError: it needs loss scaling.
    """
    if make_precision(name or "default").scale is not None:
        raise UnscaledPrecisionError(
            setting,
            name,
            "it needs loss scaling, which an unmodified script does by itself or not at all",
            fix="use bf16, or write the script with autocast and torch.amp.GradScaler, which are kept",
        )


def call_context(
    name: str | None, setting: str = "--precision"
) -> Callable[[torch.device], AbstractContextManager[object]] | None:
    """The context of each outermost call; None where there is nothing to do.

    Entering it for a call in a precision that needs loss scaling raises `UnscaledPrecisionError`.
    """
    if name in (None, "default"):
        return None
    made = make_precision(name)

    def enter(device: torch.device) -> AbstractContextManager[object]:
        refuse_unscaled(name, setting)
        made.apply_flags()  # each time: the script may set them too, and the command line wins
        return made.autocast(device)

    return enter
