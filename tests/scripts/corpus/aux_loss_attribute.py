"""A layer that leaves its penalty in an attribute during forward; the loop adds it to the loss from there."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class BottleneckLayer(nn.Module):
    """Hidden units with a cost on how far they are from standard normal."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.mean, self.log_std = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)
        self.penalty = None

    def forward(self, x):
        mean, log_std = self.mean(x), self.log_std(x)
        self.penalty = (0.5 * (mean.pow(2) + (2 * log_std).exp()) - log_std - 0.5).sum(1).mean()
        return mean


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.bottleneck, self.out = nn.Linear(9, 24), BottleneckLayer(24, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.bottleneck(torch.relu(self.inp(x))))


torch.manual_seed(121)
net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)
x = torch.randn(200, 9)
y = x[:, :3].argmax(1)
for epoch in range(4):
    for xb, yb in zip(x.split(40), y.split(40), strict=True):
        loss = F.cross_entropy(net(xb), yb)
        penalty = sum(module.penalty for module in net.modules() if isinstance(module, BottleneckLayer))
        optimizer.zero_grad()
        (loss + 0.01 * penalty).backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.5f} penalty {penalty.item():.5f}")
