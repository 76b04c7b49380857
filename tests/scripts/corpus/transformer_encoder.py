"""A transformer encoder with a (seq, seq) attention mask and a (batch, seq) key padding mask, pooled by its mask."""

import math

import torch
from torch import nn


class SinusoidalPositions(nn.Module):
    def __init__(self, d_model, longest=64):
        super().__init__()
        frequency = 10_000.0 ** (-torch.arange(0, d_model, 2) / d_model)
        angle = torch.arange(longest)[:, None] * frequency
        self.register_buffer("table", torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1))

    def forward(self, x):
        return x + self.table[: x.size(1)]


class Classifier(nn.Module):
    def __init__(self, vocab=60, d_model=32, heads=4, layers=2, classes=4):
        super().__init__()
        self.d_model = d_model
        self.embedding = nn.Embedding(vocab, d_model)
        self.position = SinusoidalPositions(d_model)
        layer = nn.TransformerEncoderLayer(d_model, heads, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(d_model, classes)

    def forward(self, tokens, src_mask, src_key_padding_mask=None):
        x = self.position(self.embedding(tokens) * math.sqrt(self.d_model))
        x = self.encoder(x, mask=src_mask, src_key_padding_mask=src_key_padding_mask)
        if src_key_padding_mask is None:
            return self.head(x.mean(1))
        kept = (~src_key_padding_mask).unsqueeze(-1).float()
        return self.head((x * kept).sum(1) / kept.sum(1))


def make_batch(size, seq):
    tokens = torch.randint(4, 60, (size, seq))
    labels = torch.randint(0, 4, (size,))
    tokens[:, 0] = labels  # the first token tells
    lengths = torch.randint(5, seq + 1, (size,))
    return tokens, torch.arange(seq)[None, :] >= lengths[:, None], labels


def band_mask(seq, width):
    """True where a position may not look: further than `width` away."""
    index = torch.arange(seq)
    return (index[None, :] - index[:, None]).abs() > width


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    criterion = nn.CrossEntropyLoss()
    mask = band_mask(12, 8)
    for step in range(25):
        tokens, padding, labels = make_batch(18, 12)
        loss = criterion(model(tokens, mask, src_key_padding_mask=padding), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 6 == 0:
            print(f"step {step:3d} | loss {loss.item():.5f}")
    model.eval()
    with torch.no_grad():
        tokens, padding, labels = make_batch(50, 12)
        accuracy = (model(tokens, mask, padding).argmax(-1) == labels).float().mean()
        unmasked = model(tokens, mask).norm()
    print(f"accuracy {accuracy:.4f}, logits without padding mask {unmasked:.4f}")
