"""A sparse autoencoder that returns the mean activation of each hidden unit, taken over the batch in forward."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SparseAutoencoder(nn.Module):
    def __init__(self, visible=15, hidden=10):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(visible, hidden), nn.Linear(hidden, visible)

    def forward(self, x):
        h = torch.sigmoid(self.encoder(x))
        return self.decoder(h), h.mean(dim=0)


def kl_divergence(rho, rho_hat):
    return (rho * torch.log(rho / rho_hat) + (1 - rho) * torch.log((1 - rho) / (1 - rho_hat))).sum()


def main():
    torch.manual_seed(103)
    data = torch.tanh(torch.randn(240, 4) @ torch.randn(4, 15))
    model = SparseAutoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(4):
        for x in data.split(40):
            reconstruction, rho_hat = model(x)
            sparsity = kl_divergence(torch.tensor(0.1), rho_hat)
            loss = F.mse_loss(reconstruction, x) + 0.05 * sparsity
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.5f} sparsity {sparsity.item():.5f} units {len(rho_hat)}")


main()
