"""Scripts that call model.forward(x) and not model(x), so that only the layers inside are called as modules."""

import torch
import torch.nn as nn


class WineQuality(nn.Module):
    def __init__(self):
        super(WineQuality, self).__init__()  # noqa: UP008
        self.fc1 = nn.Linear(11, 24)
        self.fc2 = nn.Linear(24, 12)
        self.fc3 = nn.Linear(12, 1)

    def forward(self, x):
        x = torch.sigmoid(self.fc1(x))
        x = torch.sigmoid(self.fc2(x))
        return self.fc3(x)


torch.manual_seed(107)
model = WineQuality()
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
X_train = torch.randn(150, 11)
y_train = X_train[:, :4].sum(dim=1, keepdim=True) / 2 + 5

losses = []
for i in range(30):
    y_pred = model.forward(X_train)
    loss = criterion(y_pred, y_train)
    losses.append(loss.detach().numpy())
    if i % 6 == 0:
        print(f"Epoch: {i} Loss: {loss:.5f}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("best", round(float(min(losses)), 5))
