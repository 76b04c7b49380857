"""Domain adaptation: two models share one encoder, and a gradient-reversal layer sits between encoder and critic."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class GradReverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lambd):
        ctx.lambd = lambd
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.lambd * grad, None


class LabelModel(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.classifier = encoder, nn.Linear(12, 2)

    def forward(self, x):
        return self.classifier(self.encoder(x))


class DomainModel(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.critic = encoder, nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, x, lambd):
        return self.critic(GradReverse.apply(self.encoder(x), lambd)).squeeze(-1)


torch.manual_seed(85)
encoder = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 12), nn.ReLU())
labels, domains = LabelModel(encoder), DomainModel(encoder)
params = {id(p): p for p in [*labels.parameters(), *domains.parameters()]}
optimizer = torch.optim.SGD(params.values(), lr=0.05, momentum=0.9)
shift = torch.tensor([0.0, 0.0, 1.0, -1.0, 0.5, 0.0])
for step in range(1, 31):
    source, target = torch.randn(32, 6), torch.randn(24, 6) + shift
    y = (source[:, 0] > source[:, 1]).long()
    lambd = 0.5 * step / 30
    label_loss = F.cross_entropy(labels(source), y)
    scores = domains(torch.cat([source, target]), lambd)
    domain_loss = F.binary_cross_entropy_with_logits(scores, torch.cat([torch.ones(32), torch.zeros(24)]))
    optimizer.zero_grad()
    (label_loss + domain_loss).backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: label {label_loss.item():.5f} domain {domain_loss.item():.5f} weights {len(params)}")
print(f"encoder {torch.nn.utils.parameters_to_vector(encoder.parameters()).norm().item():.5f}")
