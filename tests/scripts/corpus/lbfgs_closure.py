"""L-BFGS on the whole training set: the closure calls the model several times a step."""

import torch
import torch.nn as nn

torch.manual_seed(0)


class NextValue(nn.Module):
    """Predicts the next value of a wave at every time, and goes on from its own predictions."""

    def __init__(self, hidden=12):
        super().__init__()
        self.cell, self.read = nn.LSTMCell(1, hidden), nn.Linear(hidden, 1)

    def forward(self, wave, further=0):
        state, predicted = None, []
        for t in range(wave.size(1) + further):
            value = wave[:, t : t + 1] if t < wave.size(1) else predicted[-1]
            state = self.cell(value, state)
            predicted.append(self.read(state[0]))
        return torch.cat(predicted, dim=1)


waves = torch.sin(6 * torch.rand(21, 1) + torch.arange(16) / 2.5)
train, test = waves[3:], waves[:3]
model = NextValue()
mse = nn.MSELoss()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=4)
calls = 0


def closure():
    global calls
    calls += 1
    optimizer.zero_grad()
    loss = mse(model(train[:, :-1]), train[:, 1:])
    loss.backward()
    return loss


for step in range(5):
    loss = optimizer.step(closure)
    with torch.no_grad():
        predicted = model(test[:, :8], further=7)
    error = mse(predicted, test[:, 1:])
    print(f"step {step}: loss {loss.item():.5f}, free running {error.item():.5f}, closure called {calls} times")
