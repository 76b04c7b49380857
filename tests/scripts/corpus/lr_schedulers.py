"""Parameter groups with and without decay, a warm-up chained to a cosine, then ReduceLROnPlateau for a second phase."""

import torch
import torch.nn as nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, ReduceLROnPlateau, SequentialLR

torch.manual_seed(17)


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 32)
        self.norm = nn.LayerNorm(32)
        self.fc2 = nn.Linear(32, 1)

    def forward(self, x):
        return self.fc2(torch.relu(self.norm(self.fc1(x))))


def groups(model, decay):
    with_decay = [p for p in model.parameters() if p.ndim >= 2]
    without = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": with_decay, "weight_decay": decay}, {"params": without, "weight_decay": 0.0}]


model = Regression()
optimizer = torch.optim.AdamW(groups(model, 0.05), lr=4e-3)
x = torch.randn(320, 8)
y = x.pow(2).mean(1, keepdim=True)

warmup = LinearLR(optimizer, start_factor=0.1, total_iters=5)
cosine = CosineAnnealingLR(optimizer, T_max=20, eta_min=1e-4)
scheduler = SequentialLR(optimizer, [warmup, cosine], milestones=[5])


def one_step(i):
    index = torch.arange(40 * i, 40 * i + 40) % 320
    loss = nn.functional.mse_loss(model(x[index]), y[index])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


for i in range(25):
    lr, loss = scheduler.get_last_lr()[0], one_step(i)
    scheduler.step()
    if i % 6 == 0:
        print(f"step {i:2d} lr {lr:.6f} loss {loss:.5f}")

plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.2)
for epoch in range(6):
    mean = sum(one_step(8 * epoch + i) for i in range(8)) / 8
    plateau.step(mean)
    print(f"phase 2 epoch {epoch} lr {optimizer.param_groups[0]['lr']:.6f} loss {mean:.5f}")
