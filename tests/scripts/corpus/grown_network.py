"""A network that gets new layers while it trains, faded in by an attribute that the script sets."""

import torch
from torch import nn
from torch.nn import functional


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.Linear(6, 6)]), nn.Linear(6, 3)
        self.share = 1.0

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.head(self.share * torch.tanh(self.layers[-1](x)) + (1 - self.share) * x)


torch.manual_seed(0)
model = Growing()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    if step in (3, 6):
        model.layers.append(nn.Linear(6, 6))
        optimizer.add_param_group({"params": model.layers[-1].parameters()})
        model.share = 0.0
    model.share = min(1.0, model.share + 0.3)
    loss = functional.cross_entropy(model(torch.randn(10, 6)), torch.randint(3, (10,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.5f}, weights {sum(p.norm().item() for p in model.parameters()):.5f}")
