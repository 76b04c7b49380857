"""Data from a stream: an IterableDataset, batches until it ends, a model that is told how far it is by the loop."""

import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, seed, length):
        self.seed, self.length = seed, length

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        weights = torch.tensor([0.5, -1.0, 2.0, 0.0])
        for i in range(self.length):
            x = torch.randn(4, generator=generator)
            yield x, (x @ weights + 0.001 * i > 0).float()


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    criterion = nn.BCEWithLogitsLoss()
    seen, running = 0, None
    for step, (x, y) in enumerate(DataLoader(Stream(3, 700), batch_size=45)):
        logits = model(x).squeeze(1)
        loss = criterion(logits, y)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        seen += len(x)
        running = loss.item() if running is None else 0.9 * running + 0.1 * loss.item()
        if step % 4 == 3 or len(x) < 45:
            print(f"seen {seen}: loss {loss.item():.5f} smoothed {running:.5f}")
    held_out = list(itertools.islice(Stream(4, 100), 100))
    x, y = torch.stack([x for x, _ in held_out]), torch.stack([y for _, y in held_out])
    with torch.no_grad():
        print("held out accuracy", ((model(x).squeeze(1) > 0).float() == y).float().mean().item())


if __name__ == "__main__":
    main()
