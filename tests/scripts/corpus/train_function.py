"""A training loop in one function with evaluation under no_grad in the middle of an epoch, and a history dict."""

import json

import torch
from torch import nn


def evaluate(model, inputs, targets, batch_size=70):
    was_training = model.training
    model.eval()
    squared = absolute = 0.0
    with torch.no_grad():
        for start in range(0, len(inputs), batch_size):
            error = model(inputs[start : start + batch_size]) - targets[start : start + batch_size]
            squared += error.pow(2).sum().item()
            absolute += error.abs().sum().item()
    model.train(was_training)
    return {"mse": squared / len(inputs), "mae": absolute / len(inputs)}


def fit(model, train_set, val_set, *, epochs, batch_size, lr, eval_every):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    history = {"train": [], "val": []}
    inputs, targets = train_set
    model.train()
    step = 0
    for _ in range(epochs):
        order = torch.randperm(len(inputs))
        for start in range(0, len(inputs), batch_size):
            index = order[start : start + batch_size]
            loss = nn.functional.mse_loss(model(inputs[index]), targets[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % eval_every == 0:
                history["train"].append(round(loss.item(), 5))
                history["val"].append({k: round(v, 5) for k, v in evaluate(model, *val_set).items()})
    return history


def make(count):
    x = torch.rand(count, 2) * 4 - 2
    return x, (torch.sin(x[:, :1]) * torch.cos(x[:, 1:])).contiguous()


if __name__ == "__main__":
    torch.manual_seed(2024)
    net = nn.Sequential(nn.Linear(2, 32), nn.Softplus(), nn.Linear(32, 32), nn.Softplus(), nn.Linear(32, 1))
    history = fit(net, make(330), make(160), epochs=3, batch_size=40, lr=4e-3, eval_every=7)
    print(json.dumps(history, indent=1))
