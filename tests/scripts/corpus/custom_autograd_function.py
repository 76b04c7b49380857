"""A custom autograd.Function: binary weights and activations with straight-through gradients."""

import torch
import torch.nn as nn
from torch.autograd import Function


class BinarizeSTE(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.where(x >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * (x.abs() <= 1).to(grad_output.dtype)


class ScaleGradient(Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        return ctx.factor * grad_output, None


class BinaryLinear(nn.Linear):
    def forward(self, x):
        weight = BinarizeSTE.apply(self.weight)
        scale = self.weight.abs().mean(dim=1)
        return nn.functional.linear(x, weight) * scale + self.bias


class BinaryNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = BinaryLinear(10, 48), nn.Linear(48, 2)

    def forward(self, x):
        h = torch.tanh(self.fc1(x))
        return self.fc2(ScaleGradient.apply(h, 0.5))


torch.manual_seed(71)
net = BinaryNet()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
x = torch.randn(180, 10)
y = (x[:, :5].sum(1) > x[:, 5:].sum(1)).long()
for epoch in range(4):
    for xb, yb in zip(x.split(36), y.split(36), strict=True):
        loss = nn.functional.cross_entropy(net(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = (net(x).argmax(1) == y).float().mean().item()
    grad = net.fc1.weight.grad.norm().item()
    print(f"epoch {epoch}: loss {loss.item():.5f}, accuracy {accuracy:.4f}, grad {grad:.5f}")
