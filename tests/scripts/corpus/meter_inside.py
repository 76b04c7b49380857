"""A network that holds the meters of its own log, in plain objects."""

import torch
from torch import nn
from torch.nn import functional


class Meter:
    def __init__(self):
        self.total, self.samples = 0.0, 0

    def update(self, value, samples):
        self.total += value * samples
        self.samples += samples


class Metered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.meters = {"size": Meter()}

    def forward(self, inputs):
        outputs = self.layer(inputs)
        self.meters["size"].update(outputs.abs().mean().item(), len(inputs))
        return outputs


torch.manual_seed(0)
model = Metered()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    inputs, labels = torch.randn(10, 6), torch.randint(3, (10,))
    loss = functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    meter = model.meters["size"]
    print(f"step {step}: loss {loss.item():.5f}, size {meter.total / meter.samples:.5f} over {meter.samples}")
