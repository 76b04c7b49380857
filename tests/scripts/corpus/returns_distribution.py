"""An actor and critic whose forward returns a distribution from torch.distributions."""

import torch
from torch import nn
from torch.distributions import Categorical


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, states):
        hidden = torch.tanh(self.body(states))
        return Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(-1)


torch.manual_seed(0)
policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
for step in range(4):
    states = torch.randn(12, 4)
    choices, values = policy(states)
    actions = choices.sample()
    rewards = (actions == states.argmax(1).clamp(max=2)).float()
    gain = choices.log_prob(actions) * (rewards - values.detach())
    loss = (values - rewards).square().mean() - gain.mean() - 0.01 * choices.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.5f}, reward {rewards.mean().item():.4f}")
