"""Early stopping: the best state_dict is copied, saved to disk, and loaded again for the test; an old run resumes."""

import copy
import os
import tempfile

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

torch.manual_seed(23)


class EarlyStopping:
    def __init__(self, patience, min_delta=0.0):
        self.patience, self.min_delta = patience, min_delta
        self.best, self.bad, self.best_state = float("inf"), 0, None

    def __call__(self, loss, model):
        if loss < self.best - self.min_delta:
            self.best, self.bad = loss, 0
            self.best_state = copy.deepcopy(model.state_dict())
        else:
            self.bad += 1
        return self.bad >= self.patience


data = load_breast_cancer()
x = torch.tensor(data.data, dtype=torch.float32)
x = (x - x.mean(0)) / x.std(0)
y = torch.tensor(data.target, dtype=torch.float32)
order = torch.randperm(len(x))
train, valid, test = order[:120], order[120:300], order[300:]

model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.BCEWithLogitsLoss()
stopper = EarlyStopping(patience=3, min_delta=1e-3)

with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "best.pt")
    for epoch in range(25):
        model.train()
        for index in train[torch.randperm(len(train))].split(40):
            optimizer.zero_grad()
            criterion(model(x[index]), y[index]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            val_loss = criterion(model(x[valid]), y[valid]).item()
        stop = stopper(val_loss, model)
        if stopper.bad == 0:
            torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        if epoch % 3 == 0 or stop:
            print(f"epoch {epoch}: validation {val_loss:.5f} (best {stopper.best:.5f}, bad epochs {stopper.bad})")
        if stop:
            print(f"early stopping at epoch {epoch}")
            break
    checkpoint = torch.load(path, weights_only=True)

model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
same = all(torch.equal(stopper.best_state[key], value) for key, value in model.state_dict().items())
model.eval()
with torch.no_grad():
    logits = model(x[test])
print(f"best epoch {checkpoint['epoch']}, keys {list(checkpoint['model'])}, equal {same}")
accuracy = ((logits > 0) == y[test]).float().mean().item()
print(f"test loss {criterion(logits, y[test]).item():.5f} accuracy {accuracy:.5f}")
