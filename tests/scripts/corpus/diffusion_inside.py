"""A diffusion model whose forward draws time steps and noise, adds it, and returns the loss."""

import torch
import torch.nn as nn
from torch.nn import functional as F


class GaussianDiffusion(nn.Module):
    def __init__(self, steps=40, hidden=32):
        super().__init__()
        self.num_timesteps = steps
        self.model = nn.Sequential(nn.Linear(2 + 1, hidden), nn.SiLU(), nn.Linear(hidden, 2))
        self.register_buffer("alphas_bar", torch.cumprod(1 - torch.linspace(1e-4, 0.1, steps), dim=0))

    def q_sample(self, x_start, t, noise):
        a = self.alphas_bar[t].unsqueeze(1)
        return a.sqrt() * x_start + (1 - a).sqrt() * noise

    def forward(self, img):
        b, device = img.shape[0], img.device
        t = torch.randint(0, self.num_timesteps, (b,), device=device).long()
        noise = torch.randn_like(img)
        x = self.q_sample(img, t, noise)
        out = self.model(torch.cat([x, (t / self.num_timesteps).to(x.dtype).unsqueeze(1)], dim=1))
        loss = F.mse_loss(out, noise, reduction="none")
        return loss.mean(1).mean()


torch.manual_seed(0)
diffusion = GaussianDiffusion()
optimizer = torch.optim.Adam(diffusion.parameters(), lr=2e-3)
for step in range(40):
    angle = 6.2832 * torch.rand(64)
    loss = diffusion(torch.stack([angle.cos(), angle.sin()], dim=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 8 == 0:
        print(f"step {step} loss {loss.item():.5f}")
