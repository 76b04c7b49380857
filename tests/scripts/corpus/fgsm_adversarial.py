"""Adversarial training by FGSM: gradients with respect to the input, then a step on clean and perturbed samples."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def fgsm(model, x, y, epsilon):
    x = x.clone().requires_grad_(True)
    loss = F.cross_entropy(model(x), y)
    model.zero_grad()
    loss.backward()
    return (x + epsilon * x.grad.sign()).detach(), x.grad.detach().norm(dim=1).mean().item()


def pgd(model, x, y, epsilon, steps):
    delta = torch.zeros_like(x)
    for _ in range(steps):
        delta.requires_grad_(True)
        (grad,) = torch.autograd.grad(F.cross_entropy(model(x + delta), y), delta)
        delta = (delta + epsilon / 2 * torch.tanh(100 * grad)).clamp(-epsilon, epsilon).detach()
    return x + delta


def main():
    torch.manual_seed(39)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(240, 8)
    y = x[:, :3].argmax(1)
    for epoch in range(3):
        for xb, yb in zip(x.split(48), y.split(48), strict=True):
            adversarial, size = fgsm(model, xb, yb, epsilon=0.1)
            optimizer.zero_grad()
            loss = 0.5 * F.cross_entropy(model(xb), yb) + 0.5 * F.cross_entropy(model(adversarial), yb)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.5f} input gradient {size:.5f}")
    model.eval()
    attacked = pgd(model, x, y, epsilon=0.1, steps=3)
    with torch.no_grad():
        clean, robust = (model(x).argmax(1) == y).float().mean(), (model(attacked).argmax(1) == y).float().mean()
    print(f"clean {clean.item():.3f} robust {robust.item():.3f}")


if __name__ == "__main__":
    main()
