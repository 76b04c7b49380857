"""A network with sampled weights, whose divergence each layer keeps for the script's loss."""

import torch
from torch import nn
from torch.nn import functional


class Sampled(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.mean = nn.Parameter(torch.randn(outputs, inputs) * 0.3)
        self.spread = nn.Parameter(torch.full((outputs, inputs), -3.0))
        self.divergence = 0

    def forward(self, x):
        scale = functional.softplus(self.spread)
        self.divergence = (scale**2 + self.mean**2 - 1 - 2 * scale.log()).sum() / 2
        return x @ (self.mean + scale * torch.randn_like(scale)).T


torch.manual_seed(0)
model = nn.Sequential(Sampled(6, 8), nn.ReLU(), Sampled(8, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(5):
    inputs, labels = torch.randn(10, 6), torch.randint(3, (10,))
    fit = functional.cross_entropy(model(inputs), labels)
    divergence = model[0].divergence + model[2].divergence
    optimizer.zero_grad()
    (fit + 1e-3 * divergence).backward()
    optimizer.step()
    print(f"step {step}: fit {fit.item():.5f}, divergence {divergence.item():.4f}")
