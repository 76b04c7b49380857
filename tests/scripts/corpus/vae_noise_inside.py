"""A VAE as in the tutorials: reparameterize draws with torch.randn_like inside forward."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class VAE(nn.Module):
    def __init__(self, features, latent):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, 24), nn.ReLU(), nn.Linear(24, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 24), nn.ReLU(), nn.Linear(24, features))

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def forward(self, x):
        mu, logvar = self.encoder(x).chunk(2, dim=1)
        return self.decoder(self.reparameterize(mu, logvar)), mu, logvar


torch.manual_seed(4)
mixing = torch.randn(3, 12)
data = torch.tanh(torch.randn(400, 3) @ mixing)

vae = VAE(12, 3)
opt = torch.optim.Adam(vae.parameters(), lr=3e-3)
for epoch in range(3):
    total_rec = total_kl = 0.0
    for x in data[torch.randperm(len(data))].split(50):
        recon, mu, logvar = vae(x)
        rec = F.mse_loss(recon, x, reduction="sum") / len(x)
        kl = -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(1).mean()
        loss = rec + 0.1 * kl
        opt.zero_grad()
        loss.backward()
        opt.step()
        total_rec += rec.item()
        total_kl += kl.item()
    print(f"epoch {epoch} | reconstruction {total_rec / 8:.5f} | kl {total_kl / 8:.5f}")
print(f"decoder norm {vae.decoder[2].weight.norm().item():.5f}")
