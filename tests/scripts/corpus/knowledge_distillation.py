"""Distillation: a teacher trained first, then frozen; the student learns from its softened logits and the labels."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def make_net(width):
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 5))


def train_teacher(teacher, x, y):
    optimizer = torch.optim.Adam(teacher.parameters(), lr=5e-3)
    for xb, yb in zip(x.split(50), y.split(50), strict=True):
        loss = F.cross_entropy(teacher(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def distill(teacher, student, x, y, temperature=3.0, alpha=0.7):
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad = False
    optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)
    for epoch in range(3):
        for xb, yb in zip(x.split(50), y.split(50), strict=True):
            with torch.no_grad():
                soft = F.softmax(teacher(xb) / temperature, dim=1)
            logits = student(xb)
            kd = F.kl_div(F.log_softmax(logits / temperature, dim=1), soft, reduction="batchmean") * temperature**2
            loss = alpha * kd + (1 - alpha) * F.cross_entropy(logits, yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        agree = (teacher(x).argmax(1) == student(x).argmax(1)).float().mean().item()
        print(f"epoch {epoch}: kd {kd.item():.5f} total {loss.item():.5f} agreement {agree:.4f}")


if __name__ == "__main__":
    torch.manual_seed(7)
    x = torch.randn(400, 16)
    y = (x @ torch.randn(16, 5)).argmax(1)
    teacher, student = make_net(64), make_net(8)
    print(f"teacher: {train_teacher(teacher, x, y):.5f}")
    distill(teacher, student, x, y)
