"""A model under torch.compile; checkpoints go through the original module."""

import torch
import torch.nn as nn

torch.manual_seed(30)


class ResidualMLP(nn.Module):
    def __init__(self, width=16, depth=2):
        super().__init__()
        self.stem = nn.Linear(5, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x)


raw_model = ResidualMLP()
model = torch.compile(raw_model, backend="eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

data = torch.randn(256, 5)
labels = (data[:, 0] > 0).long() + (data[:, 1] > 0.5).long()
for step in range(16):
    index = torch.arange(step * 32, step * 32 + 32) % 256
    loss = nn.functional.cross_entropy(model(data[index]), labels[index])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.5f}")

print(sorted(raw_model.state_dict())[0], sorted(model.state_dict())[0])
print(f"stem norm {raw_model.stem.weight.norm().item():.5f}")
