"""A causal language model on padded lines: shifted logits, ignored padding, smoothed labels, perplexity."""

import math

import torch
from torch import nn
from torch.nn import functional as F

PAD, WORDS, WIDTH = -100, 30, 24


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        states, _ = self.recurrent(self.words(tokens))
        return self.head(self.norm(states))


def make_batch(samples, generator):
    start = torch.randint(0, WORDS, (samples, 1), generator=generator)
    tokens = (start + torch.arange(16) ** 2) % WORDS
    lengths = torch.randint(3, 17, (samples, 1), generator=generator).sort(0).values
    labels = tokens.masked_fill(torch.arange(16) >= lengths, PAD)
    return tokens, labels


def evaluate(model, batches):
    model.eval()
    total, count, right = 0.0, 0, 0
    with torch.no_grad():
        for tokens, labels in batches:
            logits = model(tokens)[:, :-1]
            wanted = labels[:, 1:]
            total += F.cross_entropy(logits.transpose(1, 2), wanted, ignore_index=PAD, reduction="sum").item()
            count += int((wanted != PAD).sum())
            right += int(((logits.argmax(-1) == wanted) & (wanted != PAD)).sum())
    model.train()
    return math.exp(total / count), right / count


torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
criterion = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)
validation = [make_batch(samples, generator) for samples in (8, 5)]
for step in range(24):
    tokens, labels = make_batch(11 if step % 3 else 6, generator)
    logits = model(tokens)
    shifted = logits[..., :-1, :].contiguous()
    loss = criterion(shifted.view(-1, shifted.size(-1)), labels[..., 1:].contiguous().view(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 5:
        perplexity, accuracy = evaluate(model, validation)
        sure = logits.softmax(-1).max(-1).values.mean().item()
        print(
            f"step {step}: loss {loss.item():.5f}, perplexity {perplexity:.4f}, right {accuracy:.4f}, sure {sure:.4f}"
        )
print("last logits", [round(number, 4) for number in logits[0, 0, :4].tolist()])
