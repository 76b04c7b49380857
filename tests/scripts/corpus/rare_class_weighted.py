"""A loss inside forward that weighs a rare class more; the class comes late."""

import torch
from torch import nn


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 6.0]))

    def forward(self, inputs, labels):
        scores = self.layer(inputs)
        return scores, self.loss(scores, labels)


torch.manual_seed(0)
model = Weighted()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(13):
    inputs, labels = torch.randn(10, 6), torch.randint(2, (10,))
    if step in (6, 7, 10, 11):
        labels[[0, 7, 8]] = 2
    scores, loss = model(inputs, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.5f}, gradient {model.layer.weight.grad.norm():.5f}")
