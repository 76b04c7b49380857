"""ResNet-18 as it is used on CIFAR: a 3 x 3 first convolution, no pooling before the blocks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from manycard.benchmark.workloads.images import SyntheticImages

__all__ = ["CifarResNet18", "ResNet18Cifar"]


class _Block(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut; ``(n, i, h, w) -> (n, o, h / stride, w / stride)``."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        return F.relu(y + self.shortcut(x))


class CifarResNet18(nn.Module):
    """11.2 M parameters at width 64; ``(n, 3, 32, 32) -> (n, classes)``. Source: He et al., arXiv:1512.03385."""

    def __init__(self, classes: int = 10, width: int = 64, blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        stages: list[nn.Module] = []
        channels = width
        for stage in range(4):
            outputs = width * 2**stage
            for block in range(blocks):
                stages.append(_Block(channels, outputs, stride=2 if stage > 0 and block == 0 else 1))
                channels = outputs
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.stages(self.stem(images))
        return self.head(features.mean(dim=(2, 3)))  # type: ignore[no-any-return]


class ResNet18Cifar(SyntheticImages):
    """Many small kernels: the host's cost per launch weighs as much as the cards' arithmetic."""

    name = "resnet18-cifar"
    per_card_batch = 128
    classes = 10
    size = 32
    small_size = 16

    def make_model(self) -> nn.Module:
        if self.small:
            return self._laid_out(CifarResNet18(self.classes, width=8, blocks=1))
        return self._laid_out(CifarResNet18(self.classes))
