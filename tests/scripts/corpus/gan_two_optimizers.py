"""A GAN: two optimizers, the discriminator called on real and on detached fake samples before its update."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

torch.manual_seed(99)
LATENT, BATCH = 8, 64


def mlp(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs)
    )


generator, discriminator = mlp(LATENT, 2), mlp(2, 1)
bce = nn.BCEWithLogitsLoss()
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))

angles = torch.rand(512) * 6.2831853
circle = DataLoader(torch.stack([angles.cos(), angles.sin()], dim=1), batch_size=BATCH, shuffle=True)
fixed_noise = torch.randn(100, LATENT)

for epoch in range(3):
    for i, real in enumerate(circle):
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = generator(torch.randn(len(real), LATENT))

        loss_d = (bce(discriminator(real), ones) + bce(discriminator(fake.detach()), zeros)) / 2
        optimizer_d.zero_grad()
        loss_d.backward()
        optimizer_d.step()

        loss_g = bce(discriminator(fake), ones)
        optimizer_g.zero_grad()
        loss_g.backward()
        optimizer_g.step()
        if i % 4 == 0:
            print(f"{epoch}.{i} D {loss_d.item():.5f} G {loss_g.item():.5f}")

with torch.no_grad():
    radius = generator(fixed_noise).norm(dim=1)
print(f"radius mean {radius.mean():.5f} std {radius.std():.5f}")
