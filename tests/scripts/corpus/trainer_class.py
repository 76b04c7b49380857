"""A Trainer class that owns model, optimizer and loss, with a config dataclass and a list of callback objects."""

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


@dataclass
class Config:
    lr: float = 3e-3
    batch_size: int = 30
    epochs: int = 3
    sizes: list = field(default_factory=lambda: [7, 32, 16, 3])


class MLP(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        for layer in self.layers:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, x):
        *inner, last = self.layers
        for layer in inner:
            x = torch.relu(layer(x))
        return last(x)


class Callback:
    def after_batch(self, trainer): ...

    def after_epoch(self, trainer): ...


class MeanLoss(Callback):
    def __init__(self):
        self.losses = []

    def after_batch(self, trainer):
        self.losses.append(trainer.loss.item())

    def after_epoch(self, trainer):
        print(f"epoch {trainer.epoch} mean {sum(self.losses) / len(self.losses):.5f} last {self.losses[-1]:.5f}")
        self.losses.clear()


class Validate(Callback):
    def __init__(self, dataset):
        self.loader = DataLoader(dataset, batch_size=50)

    def after_epoch(self, trainer):
        trainer.model.eval()
        with torch.no_grad():
            hits = sum((trainer.predict(x).argmax(1).cpu() == y).sum().item() for x, y in self.loader)
        print(f"    validation: {hits} of {len(self.loader.dataset)} right")


class Trainer:
    def __init__(self, config, callbacks):
        self.config, self.callbacks = config, callbacks
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = MLP(config.sizes).to(self.device)
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr)

    def predict(self, x):
        return self.model(x.to(self.device))

    def fit(self, dataset):
        loader = DataLoader(dataset, batch_size=self.config.batch_size, shuffle=True)
        for epoch in range(self.config.epochs):
            self.epoch = epoch
            self.model.train()
            for x, y in loader:
                self.loss = self.criterion(self.predict(x), y.to(self.device))
                self.optimizer.zero_grad(set_to_none=True)
                self.loss.backward()
                self.optimizer.step()
                for callback in self.callbacks:
                    callback.after_batch(self)
            for callback in self.callbacks:
                callback.after_epoch(self)


if __name__ == "__main__":
    torch.manual_seed(34)
    x = torch.randn(300, 7)
    train_set, valid_set = random_split(TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long()), [0.8, 0.2])
    Trainer(Config(), [MeanLoss(), Validate(valid_set)]).fit(train_set)
