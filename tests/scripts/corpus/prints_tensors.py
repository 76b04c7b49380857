"""A tutorial's loop that prints tensors as they are: outputs, losses computed inside and outside, and their reprs."""

import torch
from torch import nn
from torch.nn import functional


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, words, tags=None):
        scores = self.head(self.embedding(words)).log_softmax(-1)
        if tags is None:
            return scores
        return scores, functional.nll_loss(scores.flatten(0, 1), tags.flatten())


torch.manual_seed(0)
torch.set_printoptions(precision=3, sci_mode=False)
model, regressor = Tagger(), nn.Linear(4, 2)
optimizer = torch.optim.SGD([*model.parameters(), *regressor.parameters()], lr=0.5)
words, tags = torch.randint(20, (6, 3)), torch.randint(5, (6, 3))
points, targets = torch.randn(6, 4), torch.randn(6, 2)
for step in range(3):
    optimizer.zero_grad()
    scores, inside = model(words, tags)
    alone = model(words)
    predicted = regressor(points)
    outside = functional.mse_loss(predicted, targets)
    loss = inside + outside
    print(predicted)
    print(f"step {step}: {outside} {outside:.4f}", repr(loss))
    print(alone[0], alone.mean(), inside, [predicted[0]])
    print(alone.grad_fn.name(), predicted.grad_fn.name(), predicted.requires_grad, predicted.is_leaf)
    loss.backward()
    optimizer.step()
with torch.no_grad():
    print(model(words)[0], regressor(points))
