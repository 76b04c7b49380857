"""DQN: epsilon-greedy on single states, a replay buffer, a target network copied by load_state_dict."""

import collections
import random

import torch
from torch import nn

random.seed(1)
torch.manual_seed(1)
PLACES, GAMMA, BATCH = 7, 0.9, 20


class Walk:
    """Walk on a line; the right end pays, every step costs a little."""

    def reset(self):
        self.place = PLACES // 2
        return self.observe()

    def observe(self):
        return torch.eye(PLACES)[self.place]

    def step(self, right):
        self.place += 1 if right else -1
        end = self.place in (0, PLACES - 1)
        return self.observe(), 1.0 if self.place == PLACES - 1 else -0.02, end


class QNetwork(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.inner, self.value, self.advantage = nn.Linear(PLACES, hidden), nn.Linear(hidden, 1), nn.Linear(hidden, 2)

    def forward(self, state):
        h = torch.relu(self.inner(state))
        advantage = self.advantage(h)
        return self.value(h) + advantage - advantage.mean(dim=1, keepdim=True)


online, target = QNetwork(), QNetwork()
target.load_state_dict(online.state_dict())
optimizer = torch.optim.AdamW(online.parameters(), lr=2e-3, amsgrad=True)
replay = collections.deque(maxlen=500)


def choose(state, epsilon):
    if random.random() < epsilon:
        return random.randrange(2)
    with torch.no_grad():
        return online(state.unsqueeze(0)).argmax().item()


def learn():
    states, actions, rewards, following, ends = zip(*random.sample(replay, BATCH), strict=True)
    with torch.no_grad():
        best = target(torch.stack(following)).amax(dim=1)
    wanted = torch.tensor(rewards) + GAMMA * best * (1 - torch.tensor(ends, dtype=torch.float32))
    q = online(torch.stack(states))[torch.arange(BATCH), list(actions)]
    loss = nn.functional.smooth_l1_loss(q, wanted)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(online.parameters(), 1.0)
    optimizer.step()
    return loss.item()


walk, steps = Walk(), 0
for episode in range(1, 25):
    state, total, end, loss = walk.reset(), 0.0, False, 0.0
    while not end and total > -0.2:
        action = choose(state, epsilon=max(0.1, 1 - steps / 100))
        following, reward, end = walk.step(action)
        replay.append((state, action, reward, following, end))
        state, total, steps = following, total + reward, steps + 1
        loss = learn() if len(replay) >= BATCH else loss
    if episode % 4 == 0:
        target.load_state_dict(online.state_dict())
        print(f"episode {episode} return {total:.2f} steps {steps} loss {loss:.5f}")
print("values", [round(value, 4) for value in online(torch.eye(PLACES)).amax(1).tolist()])
