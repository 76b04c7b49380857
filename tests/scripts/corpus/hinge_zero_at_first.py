"""A summed hinge loss inside forward, zero and without a gradient until harder samples come."""

import torch
from torch import nn


class Margin(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 1)
        nn.init.constant_(self.layer.bias, 3.0)

    def forward(self, inputs, signs):
        return (1 - signs * self.layer(inputs)[:, 0]).clamp_min(0).sum()


torch.manual_seed(0)
model = Margin()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for step in range(14):
    inputs = torch.randn(10, 6) * 0.3
    signs = torch.ones(10) if step < 9 else torch.randint(2, (10,)) * 2.0 - 1
    loss = model(inputs, signs)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.5f}, gradient {model.layer.weight.grad.norm():.5f}")
