"""Batches of every size: an uneven last batch, one of a single sample, fewer samples than cards, a weighted metric."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(44)
x = torch.randn(65, 6)
y = (x[:, 0] + x[:, 1] > 0).long()
model = nn.Sequential(nn.Linear(6, 18), nn.ReLU(), nn.Linear(18, 2))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def run_epoch(batch_size):
    sizes, total = [], 0.0
    for xb, yb in DataLoader(TensorDataset(x, y), batch_size=batch_size):
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sizes.append(len(xb))
        total += loss.item() * len(xb)
    return sizes, total / len(x)


for batch_size in (16, 7, 31, 64, 3, 100):
    sizes, loss = run_epoch(batch_size)
    print(f"batch size {batch_size}: {len(sizes)} batches, the last of {sizes[-1]}, loss {loss:.5f}")

model.eval()
with torch.no_grad():
    one, none = model(x[:1]), model(x[:0])
print(f"one sample: {one[0, 0].item():.5f} {one[0, 1].item():.5f}, none at all: {tuple(none.shape)}")
