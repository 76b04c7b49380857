"""The first image classifier that one writes: argparse, a function to train and one to test, a StepLR, a CNN."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


class DigitsCNN(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(channels, 2 * channels, kernel_size=3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(2 * channels * 16, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv2(F.relu(self.conv1(x)))))
        return self.fc2(F.relu(self.fc1(x.flatten(start_dim=1))))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--decay", type=float, default=0.7)
    parser.add_argument("--log-every", type=int, default=4)
    parser.add_argument("--no-cuda", action="store_true")
    return parser.parse_args()


def make_loaders(batch_size):
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = TensorDataset(images[:800], labels[:800]), TensorDataset(images[800:1100], labels[800:1100])
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(test, batch_size=100)


def train_epoch(model, loader, optimizer, device, log_every):
    model.train()
    for i, (images, labels) in enumerate(loader, start=1):
        images, labels = images.to(device), labels.to(device)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % log_every == 0:
            print(f"\tbatch {i}/{len(loader)}\tloss {loss.item():.6f}")


@torch.no_grad()
def test(model, loader, device):
    model.eval()
    loss, correct = 0.0, 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        logits = model(images)
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        correct += (logits.argmax(dim=1) == labels).sum().item()
    return loss / len(loader.dataset), correct, len(loader.dataset)


def main():
    args = parse_arguments()
    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.no_cuda else "cpu")
    train_loader, test_loader = make_loaders(args.batch_size)
    model = DigitsCNN().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.decay)
    for epoch in range(args.epochs):
        print(f"epoch {epoch + 1}, lr {scheduler.get_last_lr()[0]:.4f}")
        train_epoch(model, train_loader, optimizer, device, args.log_every)
        loss, correct, count = test(model, test_loader, device)
        print(f"test: loss {loss:.5f}, correct {correct}/{count} ({correct / count:.1%})")
        scheduler.step()


if __name__ == "__main__":
    main()
