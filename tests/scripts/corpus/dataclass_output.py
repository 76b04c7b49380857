"""A module whose output is a dataclass, with a tensor that may be missing."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Output:
    prediction: Tensor
    hidden: Tensor
    log_variance: Tensor | None = None


class Heteroscedastic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
        self.mean = nn.Linear(24, 1)
        self.log_variance = nn.Linear(24, 1)

    def forward(self, x: Tensor, with_variance: bool = True) -> Output:
        hidden = self.body(x)
        return Output(self.mean(hidden), hidden, self.log_variance(hidden) if with_variance else None)


def gaussian_nll(output: Output, target: Tensor) -> Tensor:
    if output.log_variance is None:
        return (output.prediction - target).pow(2).mean()
    error = (output.prediction - target).pow(2)
    return 0.5 * (error * torch.exp(-output.log_variance) + output.log_variance).mean()


def main() -> None:
    torch.manual_seed(33)
    model = Heteroscedastic()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    x = torch.rand(200, 3) * 2 - 1
    y = x[:, :1] ** 2 + x[:, 1:2].abs() * 0.3 * torch.randn(200, 1)
    for step in range(40):
        index = torch.arange(25 * step, 25 * step + 25) % 200
        output = model(x[index], with_variance=step >= 10)
        loss = gaussian_nll(output, y[index]) + 1e-3 * output.hidden.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 8 == 0:
            has_variance = output.log_variance is not None
            print(f"step {step:2d} loss {loss.item():+.5f} variance {has_variance} {type(output).__name__}")
    with torch.no_grad():
        spread = model(x).log_variance.exp().sqrt()
    print(f"predicted spread: {spread.min().item():.5f} to {spread.max().item():.5f}")


if __name__ == "__main__":
    main()
