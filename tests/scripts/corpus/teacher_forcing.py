"""A decoder that tosses a coin at every step of forward (Python's random) for teacher forcing."""

import random

import torch
import torch.nn as nn

random.seed(6)
torch.manual_seed(6)


class Decoder(nn.Module):
    def __init__(self, vocab=12, hidden=20):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.cell = nn.GRUCell(hidden, hidden)
        self.out = nn.Linear(hidden, vocab)

    def forward(self, start, target, teacher_forcing_ratio=0.5):
        h = torch.tanh(self.embed(start))
        token, logits = start, []
        for t in range(target.size(1)):
            h = self.cell(self.embed(token), h)
            logits.append(self.out(h))
            use_teacher = random.random() < teacher_forcing_ratio
            token = target[:, t] if use_teacher else logits[-1].argmax(1)
        return torch.stack(logits, dim=1)


model = Decoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(1, 31):
    start = torch.randint(0, 12, (30,))
    target = (start[:, None] + 5 * torch.arange(1, 7)) % 12
    logits = model(start, target)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.5f}")
print(f"generator: {random.random():.5f}")
