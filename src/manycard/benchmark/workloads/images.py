"""What the image workloads share: drawn images with drawn labels, and a cross-entropy loss."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manycard.benchmark.workloads.synthetic import SyntheticWorkload

__all__ = ["SyntheticImages"]


class SyntheticImages(SyntheticWorkload):
    """Classification of drawn images, ``(n, 3, size, size)``, into `classes`."""

    unit = "images"
    has_images = True
    loss_note = (
        "BatchNorm takes its statistics from each card's shard, so losses on several cards differ from one card's"
    )
    classes: ClassVar[int]
    size: ClassVar[int]
    small_size: ClassVar[int] = 32

    def draw(self, samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        size = self.small_size if self.small else self.size
        images = torch.randn(samples, 3, size, size, generator=generator)
        labels = torch.randint(self.classes, (samples,), generator=generator)
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return images, labels

    def loss(self, model: Any, batch: Any) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)

    def _laid_out(self, model: nn.Module) -> nn.Module:
        """`model` in the memory format that the batches have."""
        return model.to(memory_format=torch.channels_last) if self.channels_last else model
