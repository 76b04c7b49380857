"""A module that says something in its first forward, and then no more."""

import torch
import torch.nn as nn


class Chatty(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.first, self.second = nn.Linear(features, 16), nn.Linear(16, 1)
        self.said = False

    def forward(self, x):
        if not self.said:
            print(f"first forward: {x.shape[1]} features, {sum(p.numel() for p in self.parameters())} parameters")
            self.said = True
        return self.second(torch.relu(self.first(x))).squeeze(-1)


torch.manual_seed(57)
model = Chatty(6)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x = torch.randn(160, 6)
y = x.abs().max(1).values
for epoch in range(4):
    for xb, yb in zip(x.split(40), y.split(40), strict=True):
        loss = nn.functional.mse_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.5f}")
