"""Label smoothing and mixup: the loop mixes the batch with a permutation of itself before it calls the model."""

import random

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_iris

random.seed(42)
np.random.seed(42)
torch.manual_seed(42)


def mix(x, targets, concentration=0.4):
    share = float(np.random.beta(concentration, concentration))
    partner = torch.randperm(len(x))
    return torch.lerp(x[partner], x, share), torch.lerp(targets[partner], targets, share)


class SoftTargetLoss(nn.Module):
    """Cross entropy with a distribution over classes as the target."""

    def forward(self, logits, targets):
        return -(targets * logits.log_softmax(dim=1)).sum(dim=1).mean()


def smooth(labels, classes, amount=0.1):
    return nn.functional.one_hot(labels, classes) * (1 - amount) + amount / classes


iris = load_iris()
x = torch.from_numpy((iris.data - iris.data.mean(0)) / iris.data.std(0)).float()
y = torch.from_numpy(iris.target)
model = nn.Sequential(nn.Linear(4, 24), nn.Mish(), nn.Linear(24, 3))
criterion, builtin = SoftTargetLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)

for epoch in range(5):
    for index in torch.randperm(150).split(40):
        mixed, targets = mix(x[index], smooth(y[index], 3))
        loss = criterion(model(mixed), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        logits = model(x)
    smoothed, again = criterion(logits, smooth(y, 3)), builtin(logits, y)
    hits = int((logits.argmax(1) == y).sum())
    print(f"epoch {epoch}: loss {loss.item():.5f} smoothed {smoothed.item():.5f} = {again.item():.5f}, {hits} right")
