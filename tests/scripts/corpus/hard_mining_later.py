"""Online hard example mining that starts after a warm-up: from then on forward keeps the worst half of the batch."""

import torch
from torch import nn
from torch.nn import functional as F


class MiningClassifier(nn.Module):
    def __init__(self, warmup):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 3))
        self.warmup, self.epoch = warmup, 0

    def forward(self, x, y):
        losses = F.cross_entropy(self.net(x), y, reduction="none")
        if self.training and self.epoch >= self.warmup:
            losses = losses.topk(len(losses) // 2).values
        return losses.mean()


torch.manual_seed(102)
x = torch.randn(200, 8)
y = (x[:, :3] + 0.5 * torch.randn(200, 3)).argmax(1)
model = MiningClassifier(warmup=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(4):
    model.epoch = epoch
    for index in torch.randperm(200).split(40):
        loss = model(x[index], y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        print(f"epoch {epoch}: last training loss {loss.item():.5f}, loss on all {model(x, y).item():.5f}")
    model.train()
