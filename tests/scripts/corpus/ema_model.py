"""An exponential moving average: a deepcopy of the model, frozen, that follows by lerp_ and is evaluated beside it."""

from copy import deepcopy

import torch
import torch.nn as nn
import torch.nn.functional as F


class Averaged:
    def __init__(self, model, decay):
        self.module = deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def follow(self, model):
        for mean, parameter in zip(self.module.parameters(), model.parameters(), strict=True):
            mean.lerp_(parameter, 1 - self.decay)
        for mean, buffer in zip(self.module.buffers(), model.buffers(), strict=True):
            mean.copy_(buffer)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(10, 30), nn.Linear(30, 4)
        self.register_buffer("scale", torch.full((10,), 0.5))

    def forward(self, x):
        return self.fc2(F.elu(self.fc1(x * self.scale)))


def main():
    torch.manual_seed(9)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Net().to(device)
    ema = Averaged(model, decay=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)
    teacher = torch.randn(10, 4)
    x_val = torch.randn(150, 10).to(device)
    y_val = (x_val.cpu() @ teacher).argmax(1).to(device)
    for step in range(1, 31):
        x = torch.randn(44, 10)
        y = (x @ teacher).argmax(1)
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.follow(model)
        if step % 10 == 0:
            with torch.no_grad():
                raw, averaged = F.cross_entropy(model(x_val), y_val), F.cross_entropy(ema.module(x_val), y_val)
            print(f"step {step} train {loss.item():.5f} val {raw.item():.5f} ema val {averaged.item():.5f}")
    distance = sum((a - b).norm().item() for a, b in zip(model.parameters(), ema.module.parameters(), strict=True))
    print(f"distance to the average {distance:.5f}")


if __name__ == "__main__":
    main()
