"""Python state in forward: the module counts its calls, and anneals a weight and a mask by the count."""

import torch
import torch.nn as nn


class Annealed(nn.Module):
    def __init__(self, warmup):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 20), nn.Tanh(), nn.Linear(20, 7))
        self.warmup = warmup
        self.calls = 0
        self.history = []

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.history.append(self.beta())
        return x + self.beta() * self.net(x)

    def beta(self):
        return min(1.0, self.calls / self.warmup)


torch.manual_seed(81)
model = Annealed(warmup=12)
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
rotation = torch.linalg.qr(torch.randn(7, 7))[0]
for step in range(1, 25):
    x = torch.randn(26, 7)
    loss = (model(x) - x @ rotation).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.5f} beta {model.beta():.3f}", model.calls, len(model.history))
