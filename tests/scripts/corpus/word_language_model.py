"""A word language model: LSTM, (time, batch) in, logits of (time * batch, words) out, SGD by hand."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(11)
VOCAB, WINDOW, CLIP = 50, 12, 0.25


class WordModel(nn.Module):
    def __init__(self, size=24, layers=2):
        super().__init__()
        self.size, self.layers = size, layers
        self.lookup = nn.Embedding(VOCAB, size)
        self.lstm = nn.LSTM(size, size, layers)
        self.project = nn.Linear(size, VOCAB)

    def start(self, columns):
        zeros = torch.zeros(self.layers, columns, self.size)
        return zeros, zeros.clone()

    def forward(self, words, state):
        hidden, state = self.lstm(self.lookup(words), state)
        return self.project(hidden).view(-1, VOCAB), state


def in_columns(words, columns):
    """Cut one long text into `columns` texts side by side: (time, columns)."""
    length = len(words) // columns
    return words[: length * columns].reshape(columns, length).T.contiguous()


def windows(text):
    for start in range(0, len(text) - 1, WINDOW):
        end = min(start + WINDOW, len(text) - 1)
        yield text[start:end], text[start + 1 : end + 1].reshape(-1)


@torch.no_grad()
def perplexity(model, text):
    model.eval()
    state, total, count = model.start(text.size(1)), 0.0, 0
    for words, following in windows(text):
        logits, state = model(words, state)
        total += F.cross_entropy(logits, following, reduction="sum").item()
        count += len(following)
    model.train()
    return math.exp(total / count)


words = (torch.arange(1500) * 7 + torch.randint(0, 3, (1500,))) % VOCAB
train_text, valid_text = in_columns(words[:1200], 8), in_columns(words[1200:], 6)
model = WordModel()
lr = 5.0
for epoch in range(2):
    state = model.start(train_text.size(1))
    for i, (words, following) in enumerate(windows(train_text)):
        state = tuple(part.detach() for part in state)
        model.zero_grad()
        logits, state = model(words, state)
        loss = F.cross_entropy(logits, following)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad
        if i % 4 == 0:
            print(f"epoch {epoch} window {i:2d} loss {loss.item():.5f} norm {norm.item():.5f}")
    print(f"epoch {epoch} validation perplexity {perplexity(model, valid_text):.4f}")
