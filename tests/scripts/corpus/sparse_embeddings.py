"""Skip-gram with negative sampling: sparse embedding gradients and SparseAdam."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SkipGram(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.u = nn.Embedding(vocab, dim, sparse=True)
        self.v = nn.Embedding(vocab, dim, sparse=True)
        nn.init.uniform_(self.u.weight, -0.5 / dim, 0.5 / dim)
        nn.init.uniform_(self.v.weight, -0.5 / dim, 0.5 / dim)

    def forward(self, center, context, negatives):
        emb_u, emb_v, emb_neg = self.u(center), self.v(context), self.v(negatives)
        positive = F.logsigmoid((emb_u * emb_v).sum(1))
        negative = F.logsigmoid(-torch.bmm(emb_neg, emb_u.unsqueeze(2)).squeeze(2)).sum(1)
        return -(positive + negative)


torch.manual_seed(16)
vocab = 200
walk = (torch.cumsum(torch.randint(-2, 3, (1600,)), 0)) % vocab
pairs = torch.stack([walk[:-1], walk[1:]], dim=1)
model = SkipGram(vocab, 12)
optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.02)

for epoch in range(2):
    for i, batch in enumerate(pairs[torch.randperm(len(pairs))].split(100)):
        negatives = torch.randint(0, vocab, (len(batch), 4))
        loss = model(batch[:, 0], batch[:, 1], negatives).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 5 == 0:
            print(f"epoch {epoch} batch {i:2d} loss {loss.item():.5f} sparse {model.u.weight.grad.is_sparse}")
print("norms", f"{model.u.weight.norm().item():.5f}", f"{model.v.weight.norm().item():.5f}")
