"""A debugging print of the batch's shape, left in forward."""

import torch
import torch.nn as nn


class Debugged(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 8, 5, stride=2)
        self.fc = nn.Linear(8 * 6, 2)

    def forward(self, x):
        x = torch.relu(self.conv(x))
        if not hasattr(self, "_printed"):
            print("after conv:", tuple(x.shape))
            self._printed = True
        return self.fc(x.flatten(1))


torch.manual_seed(58)
model = Debugged()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(12):
    x = torch.randn(20, 3, 16)
    y = (x[:, 0].mean(1) > 0).long()
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 3:
        print(f"step {step + 1}: {loss.item():.5f}")
