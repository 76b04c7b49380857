"""A classifier whose forward returns its loss, how many it got right, and a share; with many classes, none at first."""

import torch
from torch import nn
from torch.nn import functional


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 40)

    def forward(self, inputs, labels):
        scores = self.layer(inputs)
        right = scores.argmax(1) == labels
        return functional.cross_entropy(scores, labels), int(right.sum()), right.float().mean().item()


torch.manual_seed(0)
model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(18):
    inputs, labels = torch.randn(10, 6), torch.randint(40, (10,))
    loss, right, share = model(inputs, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.5f}, {right} right, {share:.2f}")
