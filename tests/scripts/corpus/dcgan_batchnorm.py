"""A convolutional GAN: BatchNorm in both networks, two backwards for one update, parameters frozen by turns."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(3)
LATENT, WIDTH, BATCH = 8, 8, 24


def up(cin, cout, kernel, stride, padding):
    return nn.Sequential(
        nn.ConvTranspose2d(cin, cout, kernel, stride, padding, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True)
    )


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = up(LATENT, 2 * WIDTH, 2, 1, 0), up(2 * WIDTH, WIDTH, 4, 2, 1)
        self.paint = nn.ConvTranspose2d(WIDTH, 1, 4, 2, 1)

    def forward(self, z):
        return torch.tanh(self.paint(self.second(self.first(z[:, :, None, None]))))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, WIDTH, 4, 2, 1)
        self.conv2, self.bn = nn.Conv2d(WIDTH, 2 * WIDTH, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * WIDTH)
        self.score = nn.Linear(2 * WIDTH * 4, 1)

    def forward(self, image):
        h = F.leaky_relu(self.conv1(image), 0.2)
        h = F.leaky_relu(self.bn(self.conv2(h)), 0.2)
        return self.score(h.flatten(1)).squeeze(1)


@torch.no_grad()
def small_weights(module):
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
        module.weight.normal_(0, 0.05)


def stripes(count):
    rows = torch.linspace(-1, 1, 8)
    slope = torch.rand(count, 1, 1)
    return torch.sin(6 * (rows[None, :, None] + slope * rows[None, None, :])).unsqueeze(1)


def bce(scores, real):
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


generator, discriminator = Generator().apply(small_weights), Discriminator().apply(small_weights)
g_optimizer = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))

for step in range(10):
    discriminator.requires_grad_(True)
    d_optimizer.zero_grad()
    on_real = bce(discriminator(stripes(BATCH)), True)
    on_real.backward()
    fake = generator(torch.randn(BATCH, LATENT))
    on_fake = bce(discriminator(fake.detach()), False)
    on_fake.backward()
    d_optimizer.step()

    discriminator.requires_grad_(False)
    g_optimizer.zero_grad()
    g_loss = bce(discriminator(fake), True)
    g_loss.backward()
    g_optimizer.step()
    if step % 3 == 0:
        print(f"step {step}: D {(on_real + on_fake).item():.5f} G {g_loss.item():.5f}")
bn = generator.first[1]
print(f"running mean {bn.running_mean.norm().item():.5f}, batches tracked {bn.num_batches_tracked.item()}")
