"""A policy called with single observations that have no batch dimension at all, then trained on stacked ones."""

import torch
import torch.nn as nn

torch.manual_seed(101)
OBS, ACTIONS = 6, 3


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.logits = nn.Linear(OBS, 24), nn.Linear(24, ACTIONS)

    def forward(self, obs):
        return torch.softmax(self.logits(torch.tanh(self.hidden(obs))), dim=-1)


policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
preference = torch.randn(OBS, ACTIONS)
for episode in range(1, 13):
    observations, actions, rewards = [], [], []
    for _ in range(20):
        obs = torch.randn(OBS)
        with torch.no_grad():
            probabilities = policy(obs)
        action = torch.multinomial(probabilities, 1).item()
        observations.append(obs)
        actions.append(action)
        rewards.append((obs @ preference)[action].item())
    rewards = torch.tensor(rewards)
    chosen = policy(torch.stack(observations)).gather(1, torch.tensor(actions).unsqueeze(1)).squeeze(1)
    loss = -(chosen.log() * (rewards - rewards.mean())).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if episode % 3 == 0:
        print(f"episode {episode} loss {loss.item():.5f} mean reward {rewards.mean().item():.5f}")
