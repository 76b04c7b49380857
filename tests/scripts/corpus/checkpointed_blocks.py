"""Activation checkpointing: blocks recomputed in backward by torch.utils.checkpoint (not reentrant)."""

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.mlp(x)


class ViT(nn.Module):
    def __init__(self, dim=16, depth=3, patch=4, image=12, classes=4, use_checkpoint=True):
        super().__init__()
        self.use_checkpoint = use_checkpoint
        self.patch = nn.Conv2d(1, dim, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.size(0), -1, -1), x], dim=1) + self.pos_embed
        for block in self.blocks:
            if self.use_checkpoint and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(x[:, 0])


def quadrant_images(count):
    """The class is the quadrant with the bright spot."""
    label = torch.randint(0, 4, (count,))
    images = 0.3 * torch.randn(count, 1, 12, 12)
    for i, k in enumerate(label.tolist()):
        images[i, 0, 6 * (k // 2) + 2 : 6 * (k // 2) + 5, 6 * (k % 2) + 2 : 6 * (k % 2) + 5] += 2
    return images, label


torch.manual_seed(64)
vit = ViT()
optimizer = torch.optim.AdamW(vit.parameters(), lr=2e-3)
for step in range(14):
    images, label = quadrant_images(22)
    loss = nn.functional.cross_entropy(vit(images), label)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 4 == 0:
        print(f"[{step:02d}] loss={loss.item():.5f}")
vit.eval()
with torch.no_grad():
    images, label = quadrant_images(60)
    loss = nn.functional.cross_entropy(vit(images), label)
    print(f"eval loss={loss.item():.5f} cls={vit.cls_token.norm().item():.5f}")
