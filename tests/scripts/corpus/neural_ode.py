"""A neural ODE: the solver, in the script, calls the module many times with a 0-dim time before one backward."""

from itertools import pairwise

import torch
import torch.nn as nn


class ODEFunc(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 2))

    def forward(self, t, y):
        return self.net(torch.cat([y**3, t.expand(y.size(0), 1)], dim=1))


def rk4(func, y, t0, t1):
    h = t1 - t0
    k1 = func(t0, y)
    k2 = func(t0 + h / 2, y + h * k1 / 2)
    k3 = func(t0 + h / 2, y + h * k2 / 2)
    k4 = func(t1, y + h * k3)
    return y + h * (k1 + 2 * k2 + 2 * k3 + k4) / 6


def odeint(func, y, times):
    trajectory = [y]
    for t0, t1 in pairwise(times):
        trajectory.append(rk4(func, trajectory[-1], t0, t1))
    return torch.stack(trajectory)


torch.manual_seed(115)
true_a = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
times = torch.linspace(0, 0.5, 6)
func = ODEFunc()
optimizer = torch.optim.RMSprop(func.parameters(), lr=2e-3)
for itr in range(1, 13):
    y0 = 1 + 0.3 * torch.randn(22, 2)
    with torch.no_grad():
        target = odeint(lambda t, y: (y**3) @ true_a, y0.clamp(0.2, 1.4), times)
    predicted = odeint(func, y0.clamp(0.2, 1.4), times)
    loss = (predicted - target).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if itr % 3 == 0:
        print(f"iteration {itr}: mean error {loss.item():.6f}")
