"""A RealNVP flow: forward gives a log-likelihood for each sample, inverse (a method, not forward) draws samples."""

import math

import torch
import torch.nn as nn


class AffineCoupling(nn.Module):
    def __init__(self, dim, hidden, flip):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(dim // 2, hidden), nn.Tanh(), nn.Linear(hidden, dim))

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        if self.flip:
            a, b = b, a
        log_s, t = self.net(a).chunk(2, dim=1)
        log_s = torch.tanh(log_s)
        b = b * log_s.exp() + t
        return torch.cat([b, a] if self.flip else [a, b], dim=1), log_s.sum(1)

    def inverse(self, z):
        a, b = z.chunk(2, dim=1)
        if self.flip:
            a, b = b, a
        log_s, t = self.net(a).chunk(2, dim=1)
        b = (b - t) * (-torch.tanh(log_s)).exp()
        return torch.cat([b, a] if self.flip else [a, b], dim=1)


class Flow(nn.Module):
    def __init__(self, dim=2, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(AffineCoupling(dim, 16, flip=i % 2 == 1) for i in range(layers))

    def forward(self, x):
        log_det = x.new_zeros(len(x))
        for layer in self.layers:
            x, ld = layer(x)
            log_det = log_det + ld
        return -0.5 * (x.pow(2) + math.log(2 * math.pi)).sum(1) + log_det

    def inverse(self, z):
        for layer in reversed(self.layers):
            z = layer.inverse(z)
        return z


torch.manual_seed(22)
flow = Flow()
optimizer = torch.optim.Adam(flow.parameters(), lr=3e-3)
for step in range(1, 31):
    first = torch.randn(54, 1)
    data = torch.cat([first, 0.5 * first.pow(2) + 0.3 * torch.randn(54, 1)], dim=1)
    nll = -flow(data).mean()
    optimizer.zero_grad()
    nll.backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step} nll {nll.item():.5f}")
with torch.no_grad():
    samples = flow.inverse(torch.randn(200, 2))
print(f"sample mean {samples.mean(0)[1].item():.5f} std {samples.std(0)[0].item():.5f}")
