"""A module called with keyword arguments, None, flags, strings and numbers beside its tensors."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(50, 8)
        self.item = nn.Embedding(80, 8)
        self.context = nn.Linear(3, 8)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, user, item, *, context=None, scale=1.0, mode="score", return_embeddings=False):
        u, v = self.user(user), self.item(item)
        if context is not None:
            u = u + torch.tanh(self.context(context))
        score = scale * (u * v).sum(-1) + self.bias
        if mode == "probability":
            score = torch.sigmoid(score)
        elif mode != "score":
            raise ValueError(f"unknown mode {mode!r}")
        if return_embeddings:
            return score, (u, v), None
        return score


def draw(generator, size, with_context):
    user = torch.randint(0, 50, (size,), generator=generator)
    item = torch.randint(0, 80, (size,), generator=generator)
    context = torch.randn(size, 3, generator=generator) if with_context else None
    liked = ((user + item) % 3 == 0).float()
    return user, item, context, liked


torch.manual_seed(90)
generator = torch.Generator().manual_seed(91)
model = Ranker()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for step in range(30):
    user, item, context, liked = draw(generator, 57, with_context=step % 2 == 0)
    score, (u, v), nothing = model(user, item=item, context=context, scale=0.5, return_embeddings=True)
    assert nothing is None
    loss = F.binary_cross_entropy_with_logits(score, liked) + 1e-3 * (u.pow(2).mean() + v.pow(2).mean())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step}: loss {loss.item():.5f} context {'no' if context is None else 'yes'}")

model.eval()
with torch.no_grad():
    user, item, context, liked = draw(generator, 200, with_context=True)
    probability = model(user, item, context=context, mode="probability")
print(f"mean probability {probability.mean().item():.5f}, brier {(probability - liked).pow(2).mean().item():.5f}")
try:
    model(user, item, mode="rank")
except ValueError as error:
    print("refused:", error)
