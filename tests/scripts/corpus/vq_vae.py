"""A VQ-VAE: a codebook kept as buffers and moved by averages of the batch in forward, a perplexity over the batch."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class VectorQuantizerEMA(nn.Module):
    def __init__(self, codes, dim, decay=0.9, commitment=0.25):
        super().__init__()
        self.decay, self.commitment = decay, commitment
        self.register_buffer("embedding", torch.randn(codes, dim))
        self.register_buffer("cluster_size", torch.ones(codes))
        self.register_buffer("average", self.embedding.clone())

    def forward(self, z):
        chosen = torch.cdist(z, self.embedding).argmin(1)
        one_hot = F.one_hot(chosen, len(self.embedding)).float()
        if self.training:
            with torch.no_grad():
                self.cluster_size.lerp_(one_hot.sum(0), 1 - self.decay)
                self.average.lerp_(one_hot.t() @ z, 1 - self.decay)
                self.embedding.copy_(self.average / self.cluster_size.clamp(min=1e-2).unsqueeze(1))
        quantized = self.embedding[chosen]
        loss = self.commitment * F.mse_loss(quantized.detach(), z)
        used = one_hot.mean(0)
        perplexity = torch.exp(-(used * torch.log(used + 1e-10)).sum())
        return loss, z + (quantized - z).detach(), perplexity


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 4))
        self.vq = VectorQuantizerEMA(8, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 10))

    def forward(self, x):
        loss, quantized, perplexity = self.vq(self.encoder(x))
        return loss, self.decoder(quantized), perplexity


torch.manual_seed(93)
centers = 2 * torch.randn(6, 10)
model = VQVAE()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(24):
    x = centers[torch.randint(0, 6, (48,))] + 0.1 * torch.randn(48, 10)
    vq_loss, reconstruction, perplexity = model(x)
    error = F.mse_loss(reconstruction, x)
    optimizer.zero_grad()
    (error + vq_loss).backward()
    optimizer.step()
    if step % 6 == 5:
        print(f"step {step + 1}: error {error.item():.5f} vq {vq_loss.item():.5f} perplexity {perplexity.item():.5f}")
print(f"codebook {model.vq.embedding.norm().item():.5f} used {model.vq.cluster_size.sum().item():.5f}")
