"""A sequence-to-sequence nn.Transformer with its default dropout, and masks made by the loop for every batch."""

import torch
import torch.nn as nn

torch.manual_seed(29)
VOCAB, D, BOS, PAD = 20, 16, 1, 0


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.src, self.tgt = nn.Embedding(VOCAB, D, padding_idx=PAD), nn.Embedding(VOCAB, D, padding_idx=PAD)
        self.pos = nn.Parameter(0.1 * torch.randn(12, D))
        self.transformer = nn.Transformer(D, 2, 1, 1, 32, batch_first=True)
        self.generator = nn.Linear(D, VOCAB)

    def forward(self, src, tgt, tgt_mask, src_padding):
        memory_in, out_in = self.src(src) + self.pos[: src.size(1)], self.tgt(tgt) + self.pos[: tgt.size(1)]
        out = self.transformer(
            memory_in,
            out_in,
            tgt_mask=tgt_mask,
            src_key_padding_mask=src_padding,
            memory_key_padding_mask=src_padding,
            tgt_is_causal=True,
        )
        return self.generator(out)


def reversed_sequences(size, length=7):
    src = torch.randint(2, VOCAB, (size, length))
    src[:, -2:][torch.rand(size) < 0.5] = PAD
    return src, torch.cat([torch.full((size, 1), BOS), src.flip(1)], dim=1)


model = Seq2Seq()
criterion = nn.CrossEntropyLoss(ignore_index=PAD)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.98), eps=1e-9)
for step in range(1, 17):
    src, tgt = reversed_sequences(24)
    mask = torch.triu(torch.ones(7, 7, dtype=torch.bool), 1)
    logits = model(src, tgt[:, :-1], mask, src == PAD)
    loss = criterion(logits.reshape(-1, VOCAB), tgt[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print(f"Step {step}: train loss {loss.item():.5f}")
print(f"position norm {model.pos.norm().item():.5f}")
