"""Models as people write them, cut without a line changed: recurrent, with masks, with skips across stages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .pipelined import pipelined

CLASSES = 11


class Recurrent(nn.Module):
    """An LSTM whose states skip the GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(CLASSES, 8)
        self.lstm, self.gru = nn.LSTM(8, 8, 2, batch_first=True), nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        out, (hidden, cell) = self.lstm(self.words(ids))
        out, _ = self.gru(out)
        return self.head(out[:, -1] + hidden[-1] + cell[0])


class Masked(nn.Module):
    """PyTorch's encoder, with masks made in forward and given to every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(CLASSES, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        padding = (ids == 0).float() * -1e9
        return self.head(self.encoder(self.words(ids), mask=causal, src_key_padding_mask=padding)[:, -1])


class UNet(nn.Module):
    """Outputs of the way down are kept in a list and used on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(channels, 4, 3, padding=1) for channels in (3, 4, 4))
        self.up = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(2))
        self.head = nn.Conv2d(4, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = F.relu(layer(x))
            kept.append(x)
        kept.pop()
        for layer in self.up:
            x = F.relu(layer(torch.cat([x, kept.pop()], 1)), inplace=True)
        return self.head(x).mean((2, 3))


class Shared(nn.Module):
    """One layer that is called on every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.shared, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.own:
            x = x + torch.tanh(self.shared(layer(x)))
        return self.head(x)


def vision_transformer() -> nn.Module:
    models = pytest.importorskip("torchvision.models")
    model = models.VisionTransformer(16, 4, 3, 2, 8, 16, num_classes=CLASSES)
    nn.init.normal_(model.heads.head.weight, std=0.1)
    return model


def residual_network() -> nn.Module:
    models = pytest.importorskip("torchvision.models")
    return models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES).eval()


def ids() -> Tensor:
    return torch.randint(0, CLASSES, (7, 5))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], list[str]]] = {
    "recurrent": (Recurrent, ids, ["gru", "head"]),
    "masked": (Masked, ids, ["encoder.layers.1", "encoder.layers.3"]),
    "unet": (UNet, lambda: torch.randn(7, 3, 6, 6), ["down.2", "up.1"]),
    "shared": (Shared, lambda: torch.randn(7, 6), ["own.1", "own.3"]),
    "vision_transformer": (
        vision_transformer,
        lambda: torch.randn(4, 3, 16, 16),
        ["encoder.layers.encoder_layer_1", "encoder.ln"],
    ),
    "residual_network": (residual_network, lambda: torch.randn(4, 3, 32, 32), ["layer2", "layer4"]),
}


def loss_fn(model: Any, batch: Any) -> Tensor:
    """Cross-entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_card(name: str) -> None:
    make, draw, names = CASES[name]
    torch.manual_seed(0)
    model = make()
    alone = copy.deepcopy(model)
    x = draw()
    batch = x, torch.randint(0, CLASSES, (len(x),))
    loss = loss_fn(alone, batch)
    loss.backward()
    with pipelined(model, "cpu:3", stages=names, micro_batches=3) as pipeline:
        step = pipeline.train_step(loss_fn, torch.optim.SGD(model.parameters(), lr=0.0))
        torch.testing.assert_close(step(batch), loss.detach(), rtol=1e-5, atol=1e-6)
        assert len(pipeline.stages) == 3
    for (key, one), other in zip(alone.named_parameters(), model.parameters(), strict=True):
        scale = one.grad.abs().max().item()
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-5 * scale + 1e-9, msg=f"gradient of {key}")
