"""Momentum contrast: a queue of old keys is a buffer; forward compares with it and puts the batch's own keys in."""

import torch
import torch.nn as nn
import torch.nn.functional as F

FEATURES, DIM, QUEUE = 12, 6, 64


def encoder():
    return nn.Sequential(nn.Linear(FEATURES, 24), nn.ReLU(), nn.Linear(24, DIM))


class MomentumContrast(nn.Module):
    def __init__(self, momentum=0.95, temperature=0.2):
        super().__init__()
        self.momentum, self.temperature = momentum, temperature
        self.query, self.key = encoder(), encoder()
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("keys", F.normalize(torch.randn(QUEUE, DIM), dim=1))
        self.register_buffer("next", torch.tensor(0))

    @torch.no_grad()
    def new_keys(self, x):
        for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
            slow.lerp_(fast, 1 - self.momentum)
        return F.normalize(self.key(x), dim=1)

    def forward(self, one, other):
        queries, keys = F.normalize(self.query(one), dim=1), self.new_keys(other)
        positive = (queries * keys).sum(dim=1, keepdim=True)
        negative = queries @ self.keys.clone().T
        at = (int(self.next) + torch.arange(len(keys))) % QUEUE
        self.keys[at] = keys
        self.next.add_(len(keys)).remainder_(QUEUE)
        return torch.cat([positive, negative], dim=1) / self.temperature


torch.manual_seed(97)
model = MomentumContrast()
optimizer = torch.optim.SGD(model.query.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
for step in range(1, 25):
    base = torch.randn(16, FEATURES)
    logits = model(base + 0.2 * torch.randn_like(base), base + 0.2 * torch.randn_like(base))
    loss = F.cross_entropy(logits, torch.zeros(16, dtype=torch.long))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.5f} next {model.next.item()} keys {model.keys.sum().item():.5f}")
