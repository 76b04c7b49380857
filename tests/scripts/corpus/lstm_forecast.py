"""Forecasting a time series with a batch-first LSTM whose first state is left out: windows in, one value out."""

import math

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


def make_windows(series, width):
    windows = series.unfold(0, width + 1, 1)
    return windows[:, :-1].unsqueeze(-1).contiguous(), windows[:, -1:].contiguous()


class Forecaster(nn.Module):
    def __init__(self, hidden=24, layers=1):
        super().__init__()
        self.lstm = nn.LSTM(input_size=1, hidden_size=hidden, num_layers=layers, batch_first=True)
        self.linear = nn.Linear(hidden, 1)

    def forward(self, x):
        out, _ = self.lstm(x)
        return self.linear(out[:, -1])


torch.manual_seed(7)
time = torch.arange(420.0)
series = torch.sin(2 * math.pi * time / 25) + 0.1 * torch.randn(420)
x, y = make_windows(series, 20)
split = 320
loader = DataLoader(TensorDataset(x[:split], y[:split]), batch_size=50, shuffle=True)

model = Forecaster()
optimizer = optim.Adam(model.parameters(), lr=1e-2)
loss_fn = nn.MSELoss()

for epoch in range(4):
    model.train()
    for x_batch, y_batch in loader:
        loss = loss_fn(model(x_batch), y_batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        train_rmse = loss_fn(model(x[:split]), y[:split]).sqrt()
        test_rmse = loss_fn(model(x[split:]), y[split:]).sqrt()
    print(f"Epoch {epoch}: train RMSE {train_rmse:.5f}, test RMSE {test_rmse:.5f}")
