"""A WGAN-GP: the gradient penalty takes autograd.grad through the critic with create_graph."""

import argparse

import torch
import torch.nn as nn

LATENT, BATCH = 4, 30


def critic_network(width=24):
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Softplus(), nn.Linear(width, 1))


def gradient_penalty(critic, real, fake):
    """How far the critic's slope is from 1, between real and fake samples."""
    between = torch.lerp(fake, real, torch.rand(len(real), 1)).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def real_samples():
    return torch.randn(BATCH, 2) * 0.2 + torch.tensor([1.0, -1.0])


def main(args):
    torch.manual_seed(0)
    critic = critic_network()
    generator = nn.Sequential(nn.Linear(LATENT, 24), nn.ReLU(), nn.Linear(24, 2))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.9))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.0, 0.9))
    for step in range(args.steps):
        for _ in range(args.critic_steps):
            real = real_samples()
            with torch.no_grad():
                fake = generator(torch.randn(BATCH, LATENT))
            penalty = gradient_penalty(critic, real, fake)
            distance = critic(real).mean() - critic(fake).mean()
            critic_optimizer.zero_grad()
            (args.penalty * penalty - distance).backward()
            critic_optimizer.step()
        loss = -critic(generator(torch.randn(BATCH, LATENT))).mean()
        generator_optimizer.zero_grad()
        loss.backward()
        generator_optimizer.step()
        if step % 3 == 0:
            print(f"step {step}: distance {distance.item():.5f} penalty {penalty.item():.5f} G {loss.item():.5f}")
    print(f"critic norm {nn.utils.parameters_to_vector(critic.parameters()).norm().item():.5f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--critic-steps", type=int, default=3)
    parser.add_argument("--penalty", type=float, default=10.0)
    main(parser.parse_args())
