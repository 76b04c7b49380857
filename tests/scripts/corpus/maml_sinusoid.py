"""MAML: inner gradient steps by autograd.grad and functional_call, an outer update through them."""

import math

import torch
import torch.nn as nn
from torch.func import functional_call


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))

    def forward(self, x):
        return self.net(x)


def sample_task():
    amplitude, phase = 0.1 + 4.9 * torch.rand(1), math.pi * torch.rand(1)
    x = 10 * torch.rand(20, 1) - 5
    y = amplitude * torch.sin(x + phase)
    return (x[:10], y[:10]), (x[10:], y[10:])


def adapt(model, params, support, inner_lr, steps=1):
    x, y = support
    for _ in range(steps):
        loss = nn.functional.mse_loss(functional_call(model, params, (x,)), y)
        grads = torch.autograd.grad(loss, tuple(params.values()), create_graph=True)
        params = {name: p - inner_lr * g for (name, p), g in zip(params.items(), grads, strict=True)}
    return params


def main():
    torch.manual_seed(1)
    model = Regressor()
    meta_optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for iteration in range(12):
        meta_optimizer.zero_grad()
        meta_loss = 0.0
        for _ in range(3):
            support, (x, y) = sample_task()
            adapted = adapt(model, dict(model.named_parameters()), support, inner_lr=0.01)
            meta_loss = meta_loss + nn.functional.mse_loss(functional_call(model, adapted, (x,)), y)
        (meta_loss / 3).backward()
        meta_optimizer.step()
        if iteration % 4 == 3:
            norm = sum(p.grad.pow(2).sum() for p in model.parameters()).sqrt()
            print(f"iteration {iteration + 1}: meta loss {meta_loss.item() / 3:.5f}, gradient norm {norm.item():.5f}")


if __name__ == "__main__":
    main()
