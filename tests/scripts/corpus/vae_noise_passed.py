"""A VAE whose noise is drawn by the training loop and passed to forward; its loss is a sum over the batch."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class DigitVAE(nn.Module):
    def __init__(self, pixels=64, hidden=32, latent=4):
        super().__init__()
        self.latent = latent
        self.hidden = nn.Linear(pixels, hidden)
        self.mean, self.log_variance = nn.Linear(hidden, latent), nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, pixels))

    def forward(self, x, noise):
        h = torch.relu(self.hidden(x))
        mean, log_variance = self.mean(h), self.log_variance(h)
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance


def negative_elbo(logits, x, mean, log_variance):
    reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
    divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum() / 2
    return reconstruction + divergence


def main():
    torch.manual_seed(1)
    images = torch.tensor(load_digits().data / 16, dtype=torch.float32)[:600]
    model = DigitVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(3):
        total = 0.0
        for x in images.split(64):
            logits, mean, log_variance = model(x, torch.randn(len(x), model.latent))
            loss = negative_elbo(logits, x, mean, log_variance)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: {total / len(images):.4f} nats an image")
    with torch.no_grad():
        samples = model.decoder(torch.randn(16, model.latent)).sigmoid()
    print(f"samples: mean {samples.mean().item():.5f}, std {samples.std().item():.5f}")


if __name__ == "__main__":
    main()
