"""An adaptive softmax called with hidden states and targets: it gives (output, loss), and log_prob for evaluation."""

import torch
import torch.nn as nn

torch.manual_seed(112)
VOCAB = 60

body = nn.Sequential(nn.Embedding(VOCAB, 16), nn.Flatten(), nn.Linear(32, 24), nn.ReLU())
adaptive = nn.AdaptiveLogSoftmaxWithLoss(24, VOCAB, cutoffs=[10, 30], div_value=2.0)
optimizer = torch.optim.Adam([*body.parameters(), *adaptive.parameters()], lr=1e-2)

pairs = torch.randint(0, VOCAB, (240, 2))
following = (pairs.sum(1) // 4 + torch.randint(0, 2, (240,))) % VOCAB
for epoch in range(4):
    for xb, yb in zip(pairs.split(48), following.split(48), strict=True):
        result = adaptive(body(xb), yb)
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {result.loss.item():.5f} mean log-probability {result.output.mean().item():.5f}")
with torch.no_grad():
    log_prob = adaptive.log_prob(body(pairs))
    print(f"sums to {log_prob.exp().sum(1).mean().item():.4f}, hits {(log_prob.argmax(1) == following).sum().item()}")
