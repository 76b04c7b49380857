"""A sum over the batch computed inside forward: the 0-dim output of a shard is a part of it, not a mean."""

import torch
import torch.nn as nn


class SumOfSquares(nn.Module):
    def __init__(self, features, hidden):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, features))

    def forward(self, x):
        return (self.net(x) - x).pow(2).sum()


def main():
    torch.manual_seed(18)
    model = SumOfSquares(8, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(160, 3) @ torch.randn(3, 8)
    for epoch in range(5):
        total = 0.0
        for x in data.split(32):
            loss = model(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: sum of squares {total:.3f}, an element {total / data.numel():.6f}")


main()
