"""Train a small network on scikit-learn's handwritten digits, on every card of the machine.

python examples/digits.py                        one process drives all cards
manycard run --strategy ddp examples/digits.py   one process a card, the same training
python examples/digits.py cpu:2                  two simulated cards, on any machine
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import manycard as mc

EPOCHS = 12

images, labels = load_digits(return_X_y=True)
images = torch.from_numpy(images).float().div(16).view(-1, 1, 8, 8)
labels = torch.from_numpy(labels)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
train, test = order[360:], order[:360]
train_set = TensorDataset(images[train], labels[train])
test_set = TensorDataset(images[test], labels[test])


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def metric_fn(model, batch):
    x, y = batch
    return {"accuracy": ((model(x).argmax(1) == y).sum(), len(y))}


def main(cards: str = "all") -> None:
    parallel = mc.Parallel(strategy="dp", cards=cards, seed=0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 32, 3, stride=2, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(32 * 16, 10))
    model, optimizer = parallel.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    loader = parallel.loader(train_set, batch_size=128, shuffle=True)
    test_loader = parallel.loader(test_set, batch_size=128)
    step = parallel.train_step(loss_fn, model, optimizer)
    for epoch in range(EPOCHS):
        for batch in parallel.progress(loader, epoch):
            loss = step(batch)
        accuracy = parallel.evaluate(metric_fn, model, test_loader)["accuracy"]
        parallel.print(f"epoch {epoch}: loss {loss.item():.4f}, test accuracy {accuracy:.1%}")
    parallel.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
