"""Masked language modelling: forward returns the rows of masked tokens only, a number that no batch size gives."""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, MASK = 26, 0


class MaskedLM(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.conv = nn.Conv1d(dim, dim, 3, padding=1)
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, tokens, masked=None):
        h = torch.relu(self.conv(self.embed(tokens).transpose(1, 2))).transpose(1, 2)
        if masked is not None:
            h = h[masked]
        return self.out(h).view(-1, VOCAB)


torch.manual_seed(104)
model = MaskedLM()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(1, 25):
    text = (torch.randint(1, VOCAB, (28, 1)) + torch.arange(9)) % (VOCAB - 1) + 1
    masked = torch.rand(28, 9) < 0.25
    logits = model(text.masked_fill(masked, MASK), masked)
    loss = F.cross_entropy(logits, text[masked])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.5f} rows {len(logits)}")
model.eval()
with torch.no_grad():
    everywhere = model(text)
print(f"all tokens: loss {F.cross_entropy(everywhere, text.flatten()).item():.5f}, shape {tuple(everywhere.shape)}")
