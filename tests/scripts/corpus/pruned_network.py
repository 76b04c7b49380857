"""Pruning: masks by torch.nn.utils.prune between epochs, made permanent at the end."""

import torch
import torch.nn as nn
import torch.nn.utils.prune as prune

torch.manual_seed(73)
model = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 20), nn.ReLU(), nn.Linear(20, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
x = torch.randn(180, 10)
y = (x[:, :2].prod(1) > 0).long()


def sparsity():
    weights = [layer.weight for layer in model if isinstance(layer, nn.Linear)]
    return sum((w == 0).sum().item() for w in weights) / sum(w.numel() for w in weights)


def train_epoch():
    for xb, yb in zip(x.split(30), y.split(30), strict=True):
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
    return loss.item()


print(f"dense: loss {train_epoch():.5f} sparsity {sparsity():.4f}")
for round_ in range(3):
    for layer in (model[0], model[2]):
        prune.l1_unstructured(layer, name="weight", amount=0.3)
    # pruning renames parameters: the optimizer keeps the same tensors
    print(f"round {round_}: loss {train_epoch():.5f} sparsity {sparsity():.4f}")
for layer in (model[0], model[2]):
    prune.remove(layer, "weight")
print("state:", *model.state_dict())
print(f"final loss {criterion(model(x), y).item():.5f} sparsity {sparsity():.4f}")
