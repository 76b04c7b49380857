"""Fine-tuning with BatchNorm layers kept in eval mode: they normalise by stored statistics, the rest is trained."""

import torch
import torch.nn as nn


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 2)

    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


torch.manual_seed(111)
model = Backbone()
for bn in (model.bn1, model.bn2):
    bn.running_mean.uniform_(-0.2, 0.2)
    bn.running_var.uniform_(0.2, 0.6)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model.train()
for step in range(16):
    y = torch.randint(0, 2, (20,))
    x = torch.randn(20, 1, 8, 8) * (1 + y.view(-1, 1, 1, 1))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.5f} bn weight {model.bn1.weight.norm().item():.5f}")
print(f"running mean {model.bn1.running_mean.norm().item():.5f}, tracked {model.bn1.num_batches_tracked.item()}")
