"""An actor-critic agent: a plain Python class that owns several modules, their targets and two optimizers."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


def mlp(sizes, output=None):
    layers = []
    for i in range(len(sizes) - 1):
        layers += [nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU()]
    layers[-1] = output if output is not None else nn.Identity()
    return nn.Sequential(*layers)


class Critic(nn.Module):
    def __init__(self, obs_dim, act_dim):
        super().__init__()
        self.q1, self.q2 = mlp([obs_dim + act_dim, 32, 1]), mlp([obs_dim + act_dim, 32, 1])

    def forward(self, obs, act):
        x = torch.cat([obs, act], dim=-1)
        return self.q1(x).squeeze(-1), self.q2(x).squeeze(-1)


class Agent:
    def __init__(self, obs_dim, act_dim, gamma=0.9, tau=0.05, policy_delay=2):
        self.gamma, self.tau, self.policy_delay, self.updates = gamma, tau, policy_delay, 0
        self.actor = mlp([obs_dim, 32, act_dim], nn.Tanh())
        self.critic = Critic(obs_dim, act_dim)
        self.actor_target, self.critic_target = copy.deepcopy(self.actor), copy.deepcopy(self.critic)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=1e-3)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=2e-3)

    def act(self, obs):
        with torch.no_grad():
            return self.actor(obs.unsqueeze(0)).squeeze(0)

    def update(self, obs, act, rew, next_obs):
        self.updates += 1
        with torch.no_grad():
            noise = (0.2 * torch.randn_like(act)).clamp(-0.5, 0.5)
            next_act = (self.actor_target(next_obs) + noise).clamp(-1, 1)
            target = rew + self.gamma * torch.min(*self.critic_target(next_obs, next_act))
        q1, q2 = self.critic(obs, act)
        critic_loss = F.mse_loss(q1, target) + F.mse_loss(q2, target)
        self.critic_optimizer.zero_grad()
        critic_loss.backward()
        self.critic_optimizer.step()
        if self.updates % self.policy_delay:
            return critic_loss.item(), None
        actor_loss = -self.critic(obs, self.actor(obs))[0].mean()
        self.actor_optimizer.zero_grad()
        actor_loss.backward()
        self.actor_optimizer.step()
        for net, target_net in ((self.actor, self.actor_target), (self.critic, self.critic_target)):
            for p, p_target in zip(net.parameters(), target_net.parameters(), strict=True):
                p_target.data.copy_(self.tau * p.data + (1 - self.tau) * p_target.data)
        return critic_loss.item(), actor_loss.item()


torch.manual_seed(10)
agent = Agent(obs_dim=4, act_dim=2)
goal = torch.randn(4, 2) * 0.5
for step in range(1, 31):
    obs = torch.randn(36, 4)
    act = (agent.actor(obs).detach() + 0.1 * torch.randn(36, 2)).clamp(-1, 1)
    rew = -(act - obs @ goal).pow(2).sum(-1)
    critic_loss, actor_loss = agent.update(obs, act, rew, obs + 0.1 * torch.randn(36, 4))
    if step % 6 == 0:
        print(f"update {step}: critic {critic_loss:.5f} actor {actor_loss:.5f}")
print("action:", [f"{a:.5f}" for a in agent.act(torch.ones(4)).tolist()])
