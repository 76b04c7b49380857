"""Forward appends activations to a global list, which the loop reads and clears after every batch."""

import torch
from torch import nn

ACTIVATIONS = []


class Traced(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 20), nn.Linear(20, 20), nn.Linear(20, 1)])

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
            ACTIVATIONS.append(x)
        return self.layers[-1](x).squeeze(1)


torch.manual_seed(122)
model = Traced()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(1, 25):
    x = torch.randn(36, 7)
    loss = (model(x) - x[:, 0].relu()).pow(2).mean()
    sparsity = torch.stack([activation.sum(1).mean() for activation in ACTIVATIONS]).sum()
    optimizer.zero_grad()
    (loss + 0.01 * sparsity).backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.5f} kept {len(ACTIVATIONS)} sparsity {sparsity.item():.5f}")
    ACTIVATIONS.clear()
