"""Proximal policy optimisation: rollouts without gradients, then epochs of shuffled minibatches, by methods."""

import torch
from torch import nn
from torch.distributions import Categorical


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))

    def act_and_value(self, states, actions=None):
        choices = Categorical(logits=self.actor(states))
        actions = choices.sample() if actions is None else actions
        return actions, choices.log_prob(actions), choices.entropy(), self.critic(states).flatten()


torch.manual_seed(0)
agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2, eps=1e-5)
states = torch.randn(4, 4)
for update in range(2):
    seen = []
    with torch.no_grad():
        for _ in range(6):
            actions, chances, _, values = agent.act_and_value(states)
            rewards = states[:, 0].cos() * (actions * 2 - 1)
            seen.append((states, actions, chances, rewards - values, rewards))
            states = torch.tanh(0.9 * states + 0.3 * (actions[:, None] * 2.0 - 1) + 0.1 * torch.randn(4, 4))
    old_states, old_actions, old_chances, gains, returns = (torch.cat(each) for each in zip(*seen, strict=True))
    for _ in range(2):
        for part in torch.randperm(24).split(12):
            _, chances, entropy, values = agent.act_and_value(old_states[part], old_actions[part])
            ratio = (chances - old_chances[part]).exp()
            gain = (gains[part] - gains[part].mean()) / (gains[part].std() + 1e-8)
            loss = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean() - 0.01 * entropy.mean()
            loss = loss + 0.5 * (values - returns[part]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    print(f"update {update}: loss {loss.item():.5f}, gradient {norm:.5f}, reward {returns.mean().item():.5f}")
