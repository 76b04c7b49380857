"""Loss scaling that is on: a GradScaler on the CPU whose first scale overflows, so that steps are skipped."""

import math

import torch
import torch.nn as nn

torch.manual_seed(4)
model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-16, growth_interval=4)

features = torch.randn(300, 10)
target = torch.tanh(features[:, :3].sum(1, keepdim=True))

skipped = 0
for step in range(20):
    index = torch.randint(0, 300, (30,))
    optimizer.zero_grad()
    loss = 8.0 * nn.functional.mse_loss(model(features[index]), target[index])
    scaler.scale(loss).backward()
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    skipped += scaler.get_scale() < before
    if step % 5 == 4:
        print(f"step {step + 1}: loss {loss.item():.5f} scale 2**{math.log2(scaler.get_scale()):.0f} skipped {skipped}")
