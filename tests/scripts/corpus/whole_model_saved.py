"""The whole model is saved with torch.save(model), loaded, deep-copied and trained further."""

import copy
import os
import pickle
import tempfile

import torch
import torch.nn as nn


class Small(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.a, self.b = nn.Linear(5, width), nn.Linear(width, 1)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def train(model, steps, tag):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        x = torch.randn(32, 5)
        loss = nn.functional.mse_loss(model(x), x.prod(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{tag}: loss {loss.item():.5f} norm {model.a.weight.norm().item():.5f}")


if __name__ == "__main__":
    torch.manual_seed(110)
    model = Small(12)
    train(model, 10, "first")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.pt")
        torch.save(model, path)
        loaded = torch.load(path, weights_only=False)
    print(type(loaded).__name__, loaded.width, sorted(vars(loaded)) == sorted(vars(model)))
    train(loaded, 10, "loaded")
    twin = copy.deepcopy(loaded)
    train(twin, 10, "copied")
    again = pickle.loads(pickle.dumps(twin))
    probe = torch.ones(4, 5)
    print("equal", torch.equal(again(probe), twin(probe)), f"{twin(probe)[0].item():.5f} {model(probe)[0].item():.5f}")
