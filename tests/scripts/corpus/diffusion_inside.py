"""A denoiser whose forward draws a time and noise for each point, mixes the noise in, and returns the loss."""

import torch
from torch import nn

TIMES = 40


class NoisePredictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
        self.register_buffer("kept", torch.linspace(0.999, 0.01, TIMES))

    def forward(self, points):
        times = torch.randint(TIMES, (len(points),), device=points.device)
        noise = torch.randn_like(points)
        share = self.kept[times][:, None]
        mixed = share.sqrt() * points + (1 - share).sqrt() * noise
        predicted = self.layers(torch.cat([mixed, share], dim=1))
        return (predicted - noise).square().mean()


torch.manual_seed(0)
model = NoisePredictor()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(40):
    angle = 6.2832 * torch.rand(64, 1)
    loss = model(torch.cat([angle.cos(), angle.sin()], dim=1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 8 == 0:
        print(f"step {step} loss {loss.item():.5f}")
