"""A denoising diffusion model: times and noise are drawn by the loop, the network predicts the noise, then samples."""

import torch
import torch.nn as nn


class Denoiser(nn.Module):
    def __init__(self, data_dim=2, hidden=48, steps=50):
        super().__init__()
        self.time = nn.Embedding(steps, hidden)
        self.inp, self.mid, self.out = (
            nn.Linear(data_dim, hidden),
            nn.Linear(hidden, hidden),
            nn.Linear(hidden, data_dim),
        )

    def forward(self, x, t):
        h = torch.nn.functional.silu(self.inp(x) + self.time(t))
        return self.out(torch.nn.functional.silu(self.mid(h)) + h)


class Diffusion:
    def __init__(self, model, steps=50):
        self.model, self.steps = model, steps
        self.betas = torch.linspace(1e-4, 0.1, steps)
        self.alphas_bar = torch.cumprod(1 - self.betas, dim=0)

    def loss(self, x0):
        t = torch.randint(0, self.steps, (len(x0),))
        noise = torch.randn_like(x0)
        a = self.alphas_bar[t].unsqueeze(1)
        return (self.model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t) - noise).square().mean()

    @torch.no_grad()
    def sample(self, n):
        x = torch.randn(n, 2)
        for t in reversed(range(self.steps)):
            predicted = self.model(x, torch.full((n,), t))
            x = (x - self.betas[t] / (1 - self.alphas_bar[t]).sqrt() * predicted) / (1 - self.betas[t]).sqrt()
            if t > 0:
                x = x + self.betas[t].sqrt() * torch.randn_like(x)
        return x


torch.manual_seed(0)
diffusion = Diffusion(Denoiser())
optimizer = torch.optim.AdamW(diffusion.model.parameters(), lr=2e-3)
for step in range(60):
    angle = 6.2832 * torch.rand(64)
    data = torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(64, 2)
    loss = diffusion.loss(data)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 12 == 0:
        print(f"step {step} loss {loss.item():.5f}")
samples = diffusion.sample(80)
print(f"sample radius {samples.norm(dim=1).mean().item():.4f}, mean {samples.mean().item():.4f}")
