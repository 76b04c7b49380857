"""A small network of the usual layers, for what is recorded on real cards."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """A convolution, BatchNorm, dropout, a layer that is not used, and ten classes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(dropout)
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(8 * 6 * 6, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(torch.relu(self.norm(self.conv(x))).flatten(1)))
