"""REINFORCE: the policy sees one observation at a time in the episode, and the stacked episode in the update."""

import math

import torch
import torch.nn as nn
from torch.distributions import Categorical


class Pole:
    """Balance a pole: push left or right, lose when it leans too far."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def reset(self):
        self.angle, self.speed = ((torch.rand(2, generator=self.generator) - 0.5) * 0.2).tolist()
        return [self.angle, self.speed]

    def step(self, action):
        self.speed += 0.1 * (math.sin(self.angle) + (1.0 if action else -1.0))
        self.angle += 0.1 * self.speed
        fallen = abs(self.angle) > 0.35
        return [self.angle, self.speed], 0.0 if fallen else 1.0, fallen


class Policy(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, 2))

    def forward(self, observation):
        return Categorical(logits=self.layers(observation)).logits


def play(pole, policy, longest=60):
    observation, episode = pole.reset(), []
    while len(episode) < longest:
        with torch.no_grad():
            logits = policy(torch.tensor([observation]))
        action = Categorical(logits=logits).sample().item()
        following, reward, fallen = pole.step(action)
        episode.append((observation, action, reward))
        observation = following
        if fallen:
            break
    return episode


def discounted(rewards, gamma=0.97):
    returns, later = [], 0.0
    for reward in reversed(rewards):
        later = reward + gamma * later
        returns.append(later)
    return torch.tensor(returns[::-1])


def main():
    torch.manual_seed(543)
    pole, policy = Pole(seed=543), Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for i in range(1, 21):
        observations, actions, rewards = zip(*play(pole, policy), strict=True)
        returns = discounted(rewards)
        advantage = (returns - returns.mean()) / (returns.std(unbiased=False) + 1e-6)
        log_probability = policy(torch.tensor(observations))[torch.arange(len(actions)), list(actions)]
        loss = -(log_probability * advantage).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 5 == 0:
            print(f"episode {i}: {len(rewards)} steps, loss {loss.item():.5f}, first return {returns[0].item():.4f}")


if __name__ == "__main__":
    main()
