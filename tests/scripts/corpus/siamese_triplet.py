"""Metric learning: the same encoder called on anchor, positive and negative, then one triplet loss."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class TripletDataset(Dataset):
    def __init__(self, size, classes=5, features=10):
        self.generator = torch.Generator().manual_seed(8)
        self.centers = torch.randn(classes, features, generator=self.generator)
        self.triplets = [self._draw(classes, features) for _ in range(size)]

    def _draw(self, classes, features):
        a, b = torch.randperm(classes, generator=self.generator)[:2]
        noise = 0.7 * torch.randn(3, features, generator=self.generator)
        return self.centers[a] + noise[0], self.centers[a] + noise[1], self.centers[b] + noise[2]

    def __len__(self):
        return len(self.triplets)

    def __getitem__(self, idx):
        return self.triplets[idx]


class EmbeddingNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.PReLU(), nn.Linear(32, 8))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


class TripletNet(nn.Module):
    """Holds the encoder once; the loop calls the encoder itself."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder


def train_epoch(net, loader, optimizer, criterion):
    total, satisfied, seen = 0.0, 0, 0
    for anchor, positive, negative in loader:
        a, p, n = net.encoder(anchor), net.encoder(positive), net.encoder(negative)
        loss = criterion(a, p, n)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        satisfied += ((a - p).norm(dim=1) < (a - n).norm(dim=1)).sum().item()
        seen += len(anchor)
    return total / len(loader), satisfied / seen


torch.manual_seed(0)
net = TripletNet(EmbeddingNet())
loader = DataLoader(TripletDataset(300), batch_size=40, shuffle=True)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
criterion = nn.TripletMarginLoss(margin=0.5)
for epoch in range(4):
    loss, accuracy = train_epoch(net, loader, optimizer, criterion)
    print(f"Epoch {epoch + 1}/4: triplet loss {loss:.5f}, triplets satisfied {accuracy:.4f}")
print("prelu", net.encoder.net[1].weight.item())
