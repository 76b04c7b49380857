"""A mixture of experts whose load-balancing loss, computed in forward, multiplies means over the batch."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class MoE(nn.Module):
    def __init__(self, dim=8, experts=4, top_k=2):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 16), nn.GELU(), nn.Linear(16, dim)) for _ in range(experts)
        )
        self.gate = nn.Linear(dim, experts, bias=False)
        self.top_k = top_k

    def forward(self, x):
        probabilities = F.softmax(self.gate(x), dim=-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == i)
            if len(row):
                out = out.index_add(0, row, weights[row, slot, None] * expert(x[row]))
        load = F.one_hot(chosen, len(self.experts)).float().mean((0, 1))
        balance = len(self.experts) * (load * probabilities.mean(0)).sum()
        return out, balance


torch.manual_seed(88)
model = MoE()
head = nn.Linear(8, 3)
optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=4e-3)
x = torch.randn(192, 8)
y = (x[:, :3] * x[:, 3:6]).argmax(1)
for epoch in range(4):
    for xb, yb in zip(x.split(48), y.split(48), strict=True):
        out, balance = model(xb)
        loss = F.cross_entropy(head(xb + out), yb)
        optimizer.zero_grad()
        (loss + 0.1 * balance).backward()
        optimizer.step()
    gate = model.gate.weight.grad.norm()
    print(f"epoch {epoch} loss {loss.item():.5f} balance {balance.item():.5f} gate {gate.item():.5f}")
