"""ResNet-50 of torchvision on drawn images of ImageNet's size."""

from __future__ import annotations

import importlib.util

from torch import nn

from manycard.benchmark.workloads.images import SyntheticImages
from manycard.errors import MissingExtraError

__all__ = ["ResNet50"]


class ResNet50(SyntheticImages):
    """25.6 M parameters, images of 224 x 224, 1,000 classes. Source: He et al., arXiv:1512.03385."""

    name = "resnet50"
    per_card_batch = 256
    classes = 1000
    size = 224

    @classmethod
    def check_available(cls) -> None:
        if importlib.util.find_spec("torchvision") is None:
            raise MissingExtraError("torchvision", "vision", f"the workload {cls.name}")

    def make_model(self) -> nn.Module:
        from torchvision.models import resnet

        if self.small:
            return self._laid_out(resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], num_classes=self.classes))
        return self._laid_out(resnet.resnet50(weights=None))
