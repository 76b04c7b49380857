"""One forward, several backwards: gradients of each task's loss on the shared layer (retain_graph) weigh the tasks."""

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(6, 20)
        self.first, self.second = nn.Linear(20, 1), nn.Linear(20, 1)

    def forward(self, x):
        h = torch.relu(self.shared(x))
        return self.first(h), self.second(h)


torch.manual_seed(113)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
weights = torch.ones(2)
for step in range(1, 25):
    x = torch.randn(34, 6)
    a, b = net(x)
    losses = [(a - x[:, :1].abs()).pow(2).mean(), (b - 3 * x[:, 1:2]).pow(2).mean()]
    norms = []
    for weight, loss in zip(weights, losses, strict=True):
        (grad,) = torch.autograd.grad(weight * loss, net.shared.weight, retain_graph=True)
        norms.append(grad.norm())
    weights = 0.9 * weights + 0.1 * torch.stack(norms).mean() / (torch.stack(norms) + 1e-3)
    optimizer.zero_grad()
    (weights[0] * losses[0]).backward(retain_graph=True)
    (weights[1] * losses[1]).backward()
    optimizer.step()
    if step % 6 == 0:
        print(
            f"step {step} losses {losses[0].item():.5f} {losses[1].item():.5f} weights", [f"{w:.4f}" for w in weights]
        )
