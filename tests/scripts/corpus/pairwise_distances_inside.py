"""A kernel layer whose output is the matrix of distances between all samples of the batch, computed in forward."""

import torch
from torch import nn


class DistanceNet(nn.Module):
    """Embeds points so that their distances are those of a given matrix (metric scaling)."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x):
        z = self.embed(x)
        return torch.cdist(z, z)


torch.manual_seed(36)
hidden = torch.randn(150, 2)
points = torch.tanh(hidden @ torch.randn(2, 10))
net = DistanceNet()
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
for epoch in range(3):
    for index in torch.randperm(150).split(30):
        wanted = torch.cdist(hidden[index], hidden[index])
        stress = (net(points[index]) - wanted).pow(2).mean()
        optimizer.zero_grad()
        stress.backward()
        optimizer.step()
    print(f"epoch {epoch} stress {stress.item():.5f}")
with torch.no_grad():
    print(f"largest distance {net(points).max().item():.5f}, shape {tuple(net(points).shape)}")
