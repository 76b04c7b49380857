"""GPT-2 in plain PyTorch on drawn tokens.

The loss is computed outside the model, from its logits, because that is what a training loop does with a model
that it didn't write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manycard.benchmark.workloads.synthetic import SyntheticWorkload

__all__ = ["GPT", "GPT2", "GPTShape"]


@dataclass(frozen=True)
class GPTShape:
    """The sizes of a GPT."""

    vocabulary: int = 50304
    """GPT-2's 50,257 rounded up to a multiple of 64, which tensor cores prefer."""
    context: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768


class _Block(nn.Module):
    """Attention and a feed-forward layer, each with a residual; ``(n, t, width) -> (n, t, width)``."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.feed_norm = nn.LayerNorm(shape.width)
        self.feed_in = nn.Linear(shape.width, 4 * shape.width)
        self.feed_out = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(n, t, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (n, heads, t, width / heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(n, t, width))
        feed = F.gelu(self.feed_in(self.feed_norm(x)), approximate="tanh")
        return x + self.feed_out(feed)  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder with tied embeddings; tokens ``(n, t) -> logits (n, t, vocabulary)``.

    No dropout, so that every strategy computes the same losses. Source: Radford et al., Language Models are
    Unsupervised Multitask Learners (2019).
    """

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(_Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self._draw_weights(shape)

    def _draw_weights(self, shape: GPTShape) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Layers that end a residual are drawn smaller, so that their sum does not grow with depth.
                ends_residual = name.endswith(("attention_out.weight", "feed_out.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if ends_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.positions(positions))
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class GPT2(SyntheticWorkload):
    """124 M parameters, 1,024 tokens a sequence."""

    name = "gpt2"
    unit = "sequences"
    per_card_batch = 16
    small_per_card_batch = 4

    @property
    def shape(self) -> GPTShape:
        """The sizes of the model that `make_model` makes."""
        return GPTShape(vocabulary=256, context=32, layers=2, heads=2, width=32) if self.small else GPTShape()

    def make_model(self) -> nn.Module:
        return GPT(self.shape)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)

    def draw(self, samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(self.shape.vocabulary, (samples, self.shape.context + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self, model: Any, batch: Any) -> Tensor:
        tokens, targets = batch
        logits = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
