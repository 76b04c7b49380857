"""A network that notes what it sees in a dict it is given, from which the script then takes a penalty."""

import torch
from torch import nn
from torch.nn import functional


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, inputs, notes):
        hidden = self.hidden(inputs).relu()
        notes["active"] = (hidden > 0).float().mean().item()
        notes["samples"] = notes.get("samples", 0) + len(inputs)
        return self.head(hidden)


torch.manual_seed(0)
model, notes = Sparse(), {}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    inputs, labels = torch.randn(10, 6), torch.randint(3, (10,))
    loss = functional.cross_entropy(model(inputs, notes), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.5f}, active {notes['active']:.4f} of {notes['samples']}")
