"""A CLIP whose forward returns features; the similarities, and the learned scale, are used by the training loop."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.image_tower = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 8))
        self.text_tower = nn.EmbeddingBag(40, 8, mode="mean")
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image=None, text=None):
        image_features = None if image is None else F.normalize(self.image_tower(image), dim=-1)
        text_features = None if text is None else F.normalize(self.text_tower(text), dim=-1)
        return image_features, text_features, self.logit_scale.exp()


class ClipLoss(nn.Module):
    def forward(self, image_features, text_features, logit_scale):
        logits = logit_scale * image_features @ text_features.T
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


torch.manual_seed(21)
kind = torch.randint(0, 10, (260,))
image = torch.randn(10, 12)[kind] + 0.2 * torch.randn(260, 12)
text = kind[:, None] * 4 + torch.randint(0, 4, (260, 6))

model, loss_fn = TwoTower(), ClipLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(20):
    index = torch.randint(0, 200, (26,))
    image_features, text_features, scale = model(image[index], text[index])
    loss = loss_fn(image_features, text_features, scale)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        grad = model.logit_scale.grad.item()
        print(f"step {step}: loss {loss.item():.5f}, scale {scale.item():.5f}, grad {grad:.5f}")

with torch.no_grad():
    queries, _, _ = model(image=image[200:])
    _, keys, _ = model(text=text[200:])
    best = (queries @ keys.T).argmax(1)
print(f"recall@1 by kind: {(kind[200:][best] == kind[200:]).float().mean().item():.4f}")
