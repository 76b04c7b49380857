"""An MLP with dropout: what is dropped is drawn in forward, on the device's generator."""

import torch
import torch.nn as nn
from sklearn.datasets import load_wine

torch.manual_seed(0)
wine = load_wine()
x = torch.tensor(wine.data, dtype=torch.float32)
x = (x - x.mean(0)) / x.std(0)
y = torch.tensor(wine.target)
order = torch.randperm(len(x))
train, test = order[:140], order[140:]

model = nn.Sequential(
    nn.Linear(13, 64),
    nn.ReLU(),
    nn.Dropout(0.3),
    nn.Linear(64, 32),
    nn.ReLU(),
    nn.Dropout(0.3),
    nn.Linear(32, 3),
)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
loss_fn = nn.CrossEntropyLoss()

for epoch in range(1, 7):
    model.train()
    for index in train[torch.randperm(len(train))].split(28):
        loss = loss_fn(model(x[index]), y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        out = model(x[test])
        accuracy = (out.argmax(1) == y[test]).float().mean()
        print(f"epoch {epoch} train {loss:.5f} test {loss_fn(out, y[test]):.5f} acc {accuracy:.4f}")
