"""Two tasks from one trunk: the output is a list of a classification and a regression head's outputs."""

import torch
import torch.nn as nn


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU())
        self.heads = nn.ModuleDict({"kind": nn.Linear(32, 4), "value": nn.Linear(32, 1)})

    def forward(self, x):
        h = self.trunk(x)
        return [self.heads["kind"](h), self.heads["value"](h).squeeze(-1)]


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count


torch.manual_seed(54)
x = torch.randn(270, 10)
kind = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
value = x[:, 2] * x[:, 3]

model = MultiTask()
params = [{"params": model.trunk.parameters()}, {"params": model.heads.parameters(), "lr": 1e-2}]
optimizer = torch.optim.RMSprop(params, lr=1e-3)
losses = {"kind": nn.CrossEntropyLoss(), "value": nn.SmoothL1Loss()}

for epoch in range(3):
    meters = {"kind": AverageMeter(), "value": AverageMeter()}
    for start in range(0, 270, 64):
        sl = slice(start, start + 64)
        outputs = model(x[sl])
        parts = {"kind": losses["kind"](outputs[0], kind[sl]), "value": losses["value"](outputs[1], value[sl])}
        total = parts["kind"] + 2.0 * parts["value"]
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        for name, part in parts.items():
            meters[name].update(part.item(), len(x[sl]))
    print(f"epoch {epoch}", *(f"{name} {meter.avg:.5f}" for name, meter in meters.items()), type(outputs).__name__)
