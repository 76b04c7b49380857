"""An energy-based model: samples drawn by the gradient of its input, with the parameters frozen meanwhile."""

import torch
from torch import nn


def sample(start):
    for parameter in energy.parameters():
        parameter.requires_grad_(False)
    points = start.clone().requires_grad_(True)
    for _ in range(4):
        (gradient,) = torch.autograd.grad(energy(points).sum(), points)
        points = (points - 0.1 * gradient + 0.05 * torch.randn_like(points)).detach().requires_grad_(True)
    for parameter in energy.parameters():
        parameter.requires_grad_(True)
    return points.detach()


torch.manual_seed(0)
energy = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(energy.parameters(), lr=1e-2)
for step in range(5):
    real, drawn = torch.randn(16, 2) * 0.3 + 1, sample(torch.rand(16, 2) * 4 - 2)
    low, high = energy(real), energy(drawn)
    loss = (low - high).mean() + 0.1 * (low.square() + high.square()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.5f}, drawn {drawn.mean().item():.5f}")
