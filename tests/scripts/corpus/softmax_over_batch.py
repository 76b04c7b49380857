"""Attention pooling over the batch: forward normalises its scores with a softmax over dimension 0."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class AttentionMIL(nn.Module):
    """Multiple-instance learning: the batch is one bag of instances, weighted by attention over all of them."""

    def __init__(self, features=8, hidden=16):
        super().__init__()
        self.feature = nn.Sequential(nn.Linear(features, hidden), nn.ReLU())
        self.attention = nn.Sequential(nn.Linear(hidden, 8), nn.Tanh(), nn.Linear(8, 1))
        self.classifier = nn.Linear(hidden, 1)

    def forward(self, x):
        h = self.feature(x)
        a = F.softmax(self.attention(h), dim=0)
        return self.classifier(a * h), a


torch.manual_seed(52)
model = AttentionMIL()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
direction = torch.randn(8)
total = 0.0
for bag in range(1, 41):
    label = float(bag % 2)
    instances = torch.randn(18, 8)
    if label:
        instances[:3] += direction
    contributions, attention = model(instances)
    loss = F.binary_cross_entropy_with_logits(contributions.sum(), torch.tensor(label))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += loss.item()
    if bag % 8 == 0:
        print(f"bag {bag} mean loss {total / 8:.5f} attention on the first three {attention[:3].sum().item():.5f}")
        total = 0.0
