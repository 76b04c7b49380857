"""Stochastic weight averaging: AveragedModel, SWALR and update_bn from torch.optim.swa_utils."""

import torch
import torch.nn as nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(13)
x = torch.randn(240, 6)
y = torch.sin(x[:, 0]) + x[:, 1] * x[:, 2]
loader = DataLoader(TensorDataset(x, y), batch_size=40, shuffle=True)

model = nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 1))
swa_model = AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
swa_scheduler = SWALR(optimizer, swa_lr=0.03, anneal_epochs=2)
swa_start = 3
loss_fn = nn.MSELoss()


def mse(net):
    with torch.no_grad():
        return loss_fn(net(x).squeeze(1), y).item()


for epoch in range(7):
    for input, target in loader:
        optimizer.zero_grad()
        loss_fn(model(input).squeeze(1), target).backward()
        optimizer.step()
    if epoch > swa_start:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()
    print(f"epoch {epoch} lr {optimizer.param_groups[0]['lr']:.5f} mse {mse(model):.5f}")

update_bn(loader, swa_model)
print(f"averaged {swa_model.n_averaged.item()} models: mse {mse(swa_model):.5f}")
