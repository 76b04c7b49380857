"""A transformer whose batch happens to be as long as its sequences, so that the (seq, seq) mask looks like a batch."""

import torch
import torch.nn as nn

torch.manual_seed(5)
SEQ = BATCH = 16


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, 30)

    def forward(self, x, attn_mask):
        h = self.embedding(x)
        h = self.norm(h + self.attention(h, h, h, attn_mask=attn_mask, need_weights=False)[0])
        return self.out(h)


model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
mask = nn.Transformer.generate_square_subsequent_mask(SEQ)
start = torch.randint(0, 30, (128,))
data = (start[:, None] + 3 * torch.arange(SEQ + 1)[None, :]) % 30

for step in range(20):
    batch = data[torch.randint(0, len(data), (BATCH,))]
    logits = model(batch[:, :-1], mask)
    loss = nn.functional.cross_entropy(logits.reshape(-1, 30), batch[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 4:
        print("step", step + 1, "loss", round(loss.item(), 5))
