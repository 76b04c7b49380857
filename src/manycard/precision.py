"""Numeric precision of the forward and backward passes: a base that changes nothing, and its variants.

Behaviour:
    * ``default`` leaves PyTorch's flags as the script set them.
    * ``fp32`` turns TF32 off for matrix products and convolutions; ``tf32`` turns it on for both.
    * ``bf16`` and ``fp16`` run the forward pass under autocast; parameters stay as they are (fp32 masters).
    * ``fp16`` scales the loss, so that small gradients survive. There is one scale for all cards. Gradients are
      unscaled before they are clipped; an update whose gradients hold inf or NaN is skipped on every card alike.

Source: https://pytorch.org/docs/stable/amp.html and Micikevicius et al., Mixed Precision Training (2018).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from manycard.errors import SettingError

__all__ = ["LossScale", "Precision", "make_precision"]


@dataclass
class LossScale:
    """The factor on an fp16 loss, and the rule that moves it.

    The rule is that of ``torch.amp.GradScaler``: halve after an update with inf or NaN, double after
    ``growth_interval`` clean updates in a row.
    """

    value: float = 65536.0
    growth_interval: int = 2000
    clean_updates: int = 0

    def record(self, overflowed: bool) -> None:
        """Note how an update went and move the factor."""
        if overflowed:
            self.value *= 0.5
            self.clean_updates = 0
            return
        self.clean_updates += 1
        if self.clean_updates == self.growth_interval:
            self.value *= 2.0
            self.clean_updates = 0

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"value": self.value, "clean_updates": self.clean_updates}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take up where a checkpoint left off."""
        self.value = float(state["value"])
        self.clean_updates = int(state["clean_updates"])


class Precision:
    """The base: whatever PyTorch's flags say, no autocast, no loss scaling."""

    name = "default"
    scale: LossScale | None = None
    tolerance = 1e-4
    """How far two computations of the same loss may lie apart, relative, before they count as different."""

    def apply_flags(self) -> None:
        """Set the process-wide flags this precision needs; called once, when `Parallel` is made."""

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """The context for a forward pass on `device`."""
        return nullcontext()


class _Fp32(Precision):
    name = "fp32"

    def apply_flags(self) -> None:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False


class _Tf32(Precision):
    name = "tf32"
    tolerance = 2e-2

    def apply_flags(self) -> None:
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True


class _Bf16(Precision):
    name = "bf16"
    tolerance = 2e-2
    dtype = torch.bfloat16

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        return torch.autocast(device.type, dtype=self.dtype)


class _Fp16(_Bf16):
    name = "fp16"
    dtype = torch.float16

    def __init__(self) -> None:
        self.scale = LossScale()


_VARIANTS: dict[str, type[Precision]] = {kind.name: kind for kind in (Precision, _Fp32, _Tf32, _Bf16, _Fp16)}


def make_precision(name: str) -> Precision:
    """Make the precision called `name`.

    Args:
        name: ``default``, ``fp32``, ``tf32``, ``bf16`` or ``fp16``.

    Raises:
        SettingError: there is no such precision.
    """
    if name not in _VARIANTS:
        raise SettingError("precision", name, "there is no such precision", fix=f"choose one of {', '.join(_VARIANTS)}")
    return _VARIANTS[name]()
