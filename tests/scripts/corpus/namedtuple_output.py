"""A policy and value network whose output is a named tuple; an A2C update on stacked rollouts."""

from typing import NamedTuple

import torch
import torch.nn as nn
from torch.distributions import Normal


class ActorCriticOutput(NamedTuple):
    mean: torch.Tensor
    log_std: torch.Tensor
    value: torch.Tensor


class ActorCritic(nn.Module):
    def __init__(self, observations, actions):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(observations, 32), nn.Tanh())
        self.mean, self.value = nn.Linear(32, actions), nn.Linear(32, 1)
        self.log_std = nn.Parameter(torch.full((actions,), -0.5))

    def forward(self, obs):
        h = self.shared(obs)
        mean = self.mean(h)
        return ActorCriticOutput(mean, self.log_std.expand_as(mean), self.value(h).squeeze(-1))


torch.manual_seed(70)
net = ActorCritic(5, 2)
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
target_map = torch.randn(5, 2) * 0.4

for update in range(1, 21):
    observations, actions, rewards = [], [], []
    obs = torch.randn(8, 5)
    for _ in range(5):
        with torch.no_grad():
            out = net(obs)
            action = Normal(out.mean, out.log_std.exp()).sample()
        observations.append(obs)
        actions.append(action)
        rewards.append(-(action - obs @ target_map).pow(2).sum(-1))
        obs = 0.9 * obs + 0.3 * torch.randn(8, 5)
    out = net(torch.cat(observations))
    dist = Normal(out.mean, out.log_std.exp())
    reward = torch.cat(rewards)
    advantage = (reward - out.value).detach()
    advantage = (advantage - advantage.mean()) / advantage.std()
    policy_loss = -(dist.log_prob(torch.cat(actions)).sum(-1) * advantage).mean()
    value_loss = (out.value - reward).pow(2).mean()
    entropy = dist.entropy().sum(-1).mean()
    loss = policy_loss + 0.5 * value_loss - 0.01 * entropy
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()
    if update % 5 == 0:
        print(f"update {update} policy {policy_loss:.5f} value {value_loss:.5f} entropy {entropy:.5f}")
        print(f"    reward {reward.mean():.5f}")
