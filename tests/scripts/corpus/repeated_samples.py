"""An importance-weighted autoencoder: forward repeats its batch k times, sample by sample within each repetition."""

import torch
import torch.nn as nn


class IWAE(nn.Module):
    def __init__(self, features=10, latent=3, k=4):
        super().__init__()
        self.k = k
        self.encoder = nn.Sequential(nn.Linear(features, 24), nn.Tanh(), nn.Linear(24, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 24), nn.Tanh(), nn.Linear(24, features))

    def forward(self, x):
        mu, log_std = self.encoder(x.repeat(self.k, 1)).chunk(2, dim=1)
        # fixed quadrature nodes in place of noise, one for each repetition
        node = torch.linspace(-1.5, 1.5, self.k).repeat_interleave(len(x)).unsqueeze(1)
        z = mu + node * log_std.exp()
        return self.decoder(z), mu, log_std, node


torch.manual_seed(105)
model = IWAE()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
data = torch.tanh(torch.randn(180, 3) @ torch.randn(3, 10))
for epoch in range(4):
    for x in data.split(30):
        reconstruction, mu, log_std, node = model(x)
        target = x.repeat(model.k, 1)
        log_p = -(reconstruction - target).pow(2).sum(1)
        log_prior = -0.5 * (mu + node * log_std.exp()).pow(2).sum(1)
        log_q = -log_std.sum(1)
        log_w = (log_p + log_prior - log_q).view(model.k, -1)
        loss = -(torch.logsumexp(log_w, dim=0) - torch.tensor(float(model.k)).log()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} bound {loss.item():.5f} reconstruction {-log_p.mean().item():.5f}")
