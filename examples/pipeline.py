"""Train a small GPT whose layers are spread over the cards, from one process.

python examples/pipeline.py               every card of the machine holds a part of the model
python examples/pipeline.py cpu:2         two simulated cards, on any machine
python examples/pipeline.py 4 2           two copies of the model on four cards, each cut in two
"""

import json
import sys

import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

import manycard as mc
from manycard.report.timeline import print_timeline

LENGTH, WIDTH, BLOCKS, EPOCHS = 24, 48, 4, 4
TEXT = json.__doc__ + json.dumps.__doc__ + json.loads.__doc__ + json.load.__doc__ + json.dump.__doc__


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend = nn.Linear(WIDTH, 3 * WIDTH)
        self.join = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in self.attend(self.norm1(x)).chunk(3, dim=2))
        x = x + self.join(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, letters):
        super().__init__()
        self.letters = nn.Embedding(letters, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, letters, bias=False)
        nn.init.normal_(self.letters.weight, std=0.05)
        nn.init.normal_(self.places.weight, std=0.05)
        self.head.weight = self.letters.weight  # one weight, used on the first card and on the last

    def forward(self, ids):
        x = self.letters(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def main(cards: str = "all", replicas: str = "1") -> None:
    torch.manual_seed(0)
    letters = sorted(set(TEXT))
    ids = torch.tensor([letters.index(letter) for letter in TEXT])
    data = ids.unfold(0, LENGTH + 1, 8)
    model = GPT(len(letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    pipeline = mc.Pipeline(model, cards, stages="auto", replicas=int(replicas))
    step = pipeline.train_step(loss_fn, optimizer, clip_norm=1.0)
    for epoch in range(EPOCHS):
        losses = [step(batch) for batch in data[torch.randperm(len(data))].split(64)]
        if epoch == 0:
            print(pipeline.describe())
        print(f"epoch {epoch}: loss {torch.stack(losses).mean().item():.3f}")
    print_timeline(pipeline.record(step, data[:64]).as_dict(), Console())
    pipeline.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
