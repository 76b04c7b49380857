"""A small GPT: causal attention, tied input and output embeddings, cross entropy over logits.view(-1, vocabulary)."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    context: int = 24
    vocabulary: int = 40
    layers: int = 2
    heads: int = 2
    width: int = 32


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)
        future = torch.ones(config.context, config.context, dtype=torch.bool).triu(1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * (width // self.heads) ** -0.5
        scores = scores.masked_fill(self.future[:length, :length], float("-inf"))
        return self.output((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.width
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = Attention(config)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Parameter(0.02 * torch.randn(config.context, config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        nn.init.normal_(self.head.weight, std=0.05)
        self.tokens.weight = self.head.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
config = Config()
model = GPT(config).to(device)
print(f"{sum(p.numel() for p in model.parameters())} parameters")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
text = torch.arange(4000) ** 2 // 7 % config.vocabulary
for step in range(16):
    start = torch.randint(len(text) - config.context, (9, 1))
    tokens = text[start + torch.arange(config.context + 1)].to(device)
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.view(-1, config.vocabulary), tokens[:, 1:].reshape(-1))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step}: loss {loss.item():.5f}, norm {norm.item():.5f}")
print("tied:", model.head.weight is model.tokens.weight, f"norm {model.tokens.weight.norm().item():.5f}")
