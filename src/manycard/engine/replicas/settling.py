"""A module put into a state in which a batch and its parts can be compared.

Dropout draws and BatchNorm statistics differ between shards by design, so a comparison sets both aside.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

__all__ = ["settle"]


def settle(module: nn.Module) -> None:
    """Put every dropout and BatchNorm layer of a scratch copy into evaluation mode."""
    for part in module.modules():
        if isinstance(part, _BatchNorm | _DropoutNd):
            part.training = False
            if isinstance(part, _BatchNorm) and part.running_mean is None:
                # Without running statistics it would use the batch's in evaluation mode too.
                first = next(module.parameters(), None)
                device = None if first is None else first.device
                dtype = next((parameter.dtype for parameter in part.parameters()), None)
                part.running_mean = torch.zeros(part.num_features, device=device, dtype=dtype)
                part.running_var = torch.ones(part.num_features, device=device, dtype=dtype)
        elif isinstance(getattr(part, "dropout", None), float) and isinstance(part, nn.RNNBase | nn.MultiheadAttention):
            part.dropout = 0.0
