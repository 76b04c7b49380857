"""A module used in parts: the loop calls model.encode(x), model.decode(z) and model.head(z), never model(x)."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SemiSupervised(nn.Module):
    def __init__(self, features=14, latent=6, classes=3):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, 28), nn.Tanh(), nn.Linear(28, latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 28), nn.Tanh(), nn.Linear(28, features))
        self.head = nn.Linear(latent, classes)
        self.temperature = nn.Parameter(torch.ones(1))

    def encode(self, x):
        return self.encoder(x) * self.temperature

    def decode(self, z):
        return self.decoder(z)

    @torch.no_grad()
    def predict(self, x):
        return self.head(self.encode(x)).argmax(1)


torch.manual_seed(27)
model = SemiSupervised()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
kind = torch.randint(0, 3, (300,))
x = torch.randn(3, 14)[kind] + 0.8 * torch.randn(300, 14)
labelled = torch.arange(300) < 60

for epoch in range(4):
    for index in torch.randperm(300).split(50):
        z = model.encode(x[index])
        reconstruction = F.mse_loss(model.decode(z), x[index])
        known = labelled[index]
        supervised = F.cross_entropy(model.head(z[known]), kind[index][known])
        loss = reconstruction + supervised
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    hits = (model.predict(x) == kind).float().mean().item()
    print(f"epoch {epoch}: reconstruction {reconstruction:.5f} supervised {supervised:.5f} accuracy {hits:.4f}")
print(f"temperature {model.temperature.item():.5f}")
