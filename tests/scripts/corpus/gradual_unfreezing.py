"""Gradual unfreezing: requires_grad switched on from the top, groups added to the optimizer while training."""

from itertools import pairwise

import torch
import torch.nn as nn

torch.manual_seed(74)


class Encoder(nn.Module):
    def __init__(self, dims=(9, 24, 24, 24)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(dims))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(24, 3)

    def forward(self, x):
        return self.head(self.encoder(x))


model = Model()
for p in model.encoder.parameters():
    p.requires_grad_(False)
optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
x = torch.randn(210, 9)
y = x[:, :3].argmax(1)

for phase in range(4):
    if phase:
        layer = model.encoder.layers[-phase]
        layer.requires_grad_(True)
        optimizer.add_param_group({"params": layer.parameters(), "lr": 0.1 / 2**phase})
    for xb, yb in zip(x.split(42), y.split(42), strict=True):
        loss = nn.functional.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with_grad = [name for name, p in model.named_parameters() if p.grad is not None or p.requires_grad]
    print(f"phase {phase}: loss {loss.item():.5f} groups {len(optimizer.param_groups)} trained {len(with_grad)}")
print("frozen at the end:", [name for name, p in model.named_parameters() if not p.requires_grad])
