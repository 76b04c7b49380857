"""The usual mixed precision loop, written for a GPU and switched off on a CPU: autocast and GradScaler disabled."""

import torch
import torch.nn as nn

torch.manual_seed(8)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
use_amp = device.type == "cuda"

model = nn.Sequential(nn.Conv1d(2, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(32, 3))
model.to(device)
criterion = nn.CrossEntropyLoss().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler(device.type, enabled=use_amp)

signal = torch.randn(240, 2, 20)
label = torch.randint(0, 3, (240,))
signal[:, 0] += torch.sin(torch.arange(20) * (label[:, None] + 1) / 2)

for epoch in range(4):
    for start in range(0, 240, 48):
        inputs = signal[start : start + 48].to(device, non_blocking=True)
        targets = label[start : start + 48].to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device_type=device.type, dtype=torch.float16, enabled=use_amp):
            loss = criterion(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
    print("epoch", epoch, "loss", round(loss.item(), 5), "norm", round(norm.item(), 5), "scale", scaler.get_scale())
