"""A GPT that returns (logits, loss) when given targets and (logits, None) when not, and generates greedily."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(4)
CONTEXT, BATCH, WIDTH, HEADS = 16, 12, 24, 2

text = "she sells sea shells on the sea shore; the shells she sells are sea shells, i am sure. " * 20
alphabet = sorted(set(text))
tokens = torch.tensor([alphabet.index(letter) for letter in text])
splits = {"train": tokens[:1500], "valid": tokens[1500:]}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads, self.join = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.heads(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.join(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.letters, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens, targets=None):
        places = torch.arange(tokens.size(1), device=tokens.device)
        logits = self.head(self.layers(self.letters(tokens) + self.places(places)))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss

    @torch.no_grad()
    def generate(self, tokens, count):
        for _ in range(count):
            logits, _ = self(tokens[:, -CONTEXT:])
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
        return tokens


def batch(split):
    data = splits[split]
    rows = torch.randint(len(data) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT + 1)
    return data[rows][:, :-1], data[rows][:, 1:]


def estimate(model, batches=3):
    model.eval()
    with torch.no_grad():
        losses = {split: sum(model(*batch(split))[1].item() for _ in range(batches)) / batches for split in splits}
    model.train()
    return losses


model = LanguageModel(len(alphabet))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(18):
    if step % 6 == 0:
        print(f"step {step}:", ", ".join(f"{split} {loss:.5f}" for split, loss in estimate(model).items()))
    _, loss = model(*batch("train"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("perplexity", round(math.exp(loss.item()), 4))
print(repr("".join(alphabet[i] for i in model.generate(tokens[None, :5], 30)[0].tolist())))
