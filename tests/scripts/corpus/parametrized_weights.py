"""Weight normalisation, spectral normalisation and a parametrization of one's own on the layers of a model."""

import torch
import torch.nn as nn
from torch.nn.utils import parametrizations, parametrize

torch.manual_seed(72)


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = parametrizations.weight_norm(nn.Linear(6, 16))
        self.mix = nn.Linear(16, 16)
        parametrize.register_parametrization(self.mix, "weight", Symmetric())
        self.out = parametrizations.spectral_norm(nn.Linear(16, 1))

    def forward(self, x):
        return self.out(torch.tanh(self.mix(torch.tanh(self.inp(x)))))


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
print("parameters:", *sorted(name for name, _ in model.named_parameters()))
for step in range(1, 31):
    x = torch.randn(38, 6)
    loss = (model(x).squeeze(1) - torch.sin(x[:, 0])).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.5f}")
model.eval()
with torch.no_grad():
    symmetric = torch.equal(model.mix.weight, model.mix.weight.T)
    print(f"symmetric {symmetric}, spectral norm {torch.linalg.matrix_norm(model.out.weight, 2).item():.4f}")
