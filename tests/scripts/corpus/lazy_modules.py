"""Lazy layers whose sizes come from a first forward on one batch; then the model is printed, the optimizer made."""

import torch
from torch import nn

torch.manual_seed(109)


class LazyNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.features = nn.Sequential(nn.LazyConv1d(6, 3), nn.ReLU(), nn.LazyConv1d(8, 3), nn.ReLU(), nn.Flatten())
        self.classifier = nn.LazyLinear(classes)

    def forward(self, x):
        return self.classifier(self.features(x))


x = torch.randn(160, 2, 14)
y = (x[:, 0].sum(1) > 0).long() + (x[:, 1].sum(1) > 0).long()
model = LazyNet(3)
with torch.no_grad():
    model(x[:20])
print(model)
print(sum(p.numel() for p in model.parameters()), "parameters")

optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(3):
    for xb, yb in zip(x.split(20), y.split(20), strict=True):
        loss = nn.functional.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.5f}")
