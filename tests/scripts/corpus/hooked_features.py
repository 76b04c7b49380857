"""Features taken by a forward hook on a layer inside the model; the loop uses them in the loss."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(37)
model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 3))
seen = {}


def keep(module, inputs, output):
    seen["embedding"] = output


handle = model[2].register_forward_hook(keep)

x = torch.randn(200, 8)
y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(4):
    for xb, yb in zip(x.split(40), y.split(40), strict=True):
        logits = model(xb)
        embedding = seen["embedding"]
        centers = torch.stack([embedding[yb == c].mean(0) for c in range(3)])
        compact = (embedding - centers[yb]).pow(2).mean()
        loss = F.cross_entropy(logits, yb) + 0.1 * compact
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.5f} compact {compact.item():.5f} embedding {tuple(embedding.shape)}")
handle.remove()
