"""A physics-informed network: first and second derivatives of the output by the input are part of the loss."""

import math

import torch
import torch.nn as nn

torch.manual_seed(114)


class PINN(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, x, t):
        return self.net(torch.cat([x, t], dim=1))


def residual(u_net, x, t, nu=0.1):
    """Of the heat equation u_t = nu u_xx."""
    x, t = x.requires_grad_(), t.requires_grad_()
    u = u_net(x, t)
    u_t = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)[0]
    u_x = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
    u_xx = torch.autograd.grad(u_x, x, torch.ones_like(u_x), create_graph=True)[0]
    return u_t - nu * u_xx


model = PINN()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for it in range(21):
    interior = residual(model, torch.rand(44, 1), torch.rand(44, 1)).pow(2).mean()
    x0 = torch.rand(26, 1)
    initial = (model(x0, torch.zeros_like(x0)) - torch.sin(math.pi * x0)).pow(2).mean()
    t = torch.rand(13, 1)
    boundary = model(torch.zeros_like(t), t).pow(2).mean() + model(torch.ones_like(t), t).pow(2).mean()
    loss = interior + initial + boundary
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if it % 5 == 0:
        print(f"it {it}: residual {interior.item():.5f} initial {initial.item():.5f} boundary {boundary.item():.5f}")
