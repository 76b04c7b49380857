"""Gradient accumulation: every fourth backward is followed by an update, and so is an incomplete last group."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def get_model():
    return nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 1))


def train(model, loader, optimizer, accumulation_steps):
    updates, running = 0, 0.0
    optimizer.zero_grad()
    for i, (x, y) in enumerate(loader):
        loss = nn.functional.mse_loss(model(x), y) / accumulation_steps
        loss.backward()
        running += loss.item()
        if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
            grad_norm = torch.sqrt(sum(p.grad.pow(2).sum() for p in model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
            print(f"  update {updates}: loss {running:.5f} grad norm {grad_norm.item():.5f}")
            running = 0.0
    return updates


if __name__ == "__main__":
    torch.manual_seed(100)
    x = torch.randn(210, 12)
    y = x[:, :1] * x[:, 1:2] + 0.5 * x[:, 2:3]
    loader = DataLoader(TensorDataset(x, y), batch_size=15, shuffle=True)
    model = get_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(2):
        print(f"epoch {epoch}")
        updates = train(model, loader, optimizer, accumulation_steps=4)
    weights = nn.utils.parameters_to_vector(model.parameters())
    print(f"{updates} updates an epoch; weights {weights.norm().item():.5f}")
