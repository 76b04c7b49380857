"""Barlow-Twins-like features centred and scaled by the batch's own mean and deviation inside forward."""

import torch
import torch.nn as nn


class Projector(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 6))

    def forward(self, x):
        z = self.net(x)
        return (z - z.mean(0)) / (z.std(0) + 1e-5)


def off_diagonal(matrix):
    return matrix - torch.diag(torch.diagonal(matrix))


torch.manual_seed(38)
model = Projector()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
basis = torch.randn(4, 12)
for step in range(25):
    x = torch.randn(40, 4) @ basis
    z1, z2 = model(x + 0.1 * torch.randn_like(x)), model(x + 0.1 * torch.randn_like(x))
    c = z1.T @ z2 / len(x)
    loss = (torch.diagonal(c) - 1).pow(2).sum() + 0.05 * off_diagonal(c).pow(2).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.5f} diagonal {torch.diagonal(c).mean().item():.5f}")
