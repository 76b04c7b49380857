"""Cut batches of sentences by length: each card gets sentences of its own length, and hardly computes on padding.

    python examples/length_buckets.py                      on all cards; prints what cutting by length saves
    python examples/length_buckets.py --cards cpu:2        on two simulated cards, on any machine
    python examples/length_buckets.py --json               the figures as JSON

A tagger learns to say of each word whether it comes again later in its sentence. It reads the lines of Python's own
source files as sentences, whose lengths differ as lengths of real text do. A batch holds lines of all lengths, padded
to its longest. Cut evenly, each card computes on nearly all of that padding. Here `split` sorts a batch by length and
gives each card a run of it, trimmed to its own longest line; runs end where the busiest card has least to compute. The
loss is a sum over words with its count, so the gradient is that of the whole batch.
"""

import argparse
import ast
import glob
import json
import os
import random
import sys
import time
import tokenize

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import manycard as mc

PADDING, UNKNOWN, WORDS = 0, 1, 2000
IGNORED = -100


def read_sentences(count: int) -> list[list[str]]:
    """Lines of Python's standard library, as lists of words."""
    sentences = []
    for path in sorted(glob.glob(os.path.join(os.path.dirname(ast.__file__), "*.py"))):
        with open(path, "rb") as file:
            line = []
            for token in tokenize.tokenize(file.readline):
                if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER):
                    line.append(token.string)
                elif token.type == tokenize.NEWLINE and line:
                    sentences.append(line)
                    line = []
        if len(sentences) > 20 * count:
            break
    return random.Random(0).sample(sentences, count)


def make_samples(sentences: list[list[str]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Word numbers, and for each whether the word comes again."""
    counts: dict[str, int] = {}
    for word in (word for sentence in sentences for word in sentence):
        counts[word] = counts.get(word, 0) + 1
    known = {word: number for number, word in enumerate(sorted(counts, key=counts.get, reverse=True)[: WORDS - 2], 2)}
    samples = []
    for sentence in sentences:
        ids = torch.tensor([known.get(word, UNKNOWN) for word in sentence])
        again = torch.tensor([int(word in sentence[place + 1 :]) for place, word in enumerate(sentence)])
        samples.append((ids, again))
    return samples


def pad(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch: rows padded to the longest."""
    ids, again = zip(*samples, strict=True)
    rows = nn.utils.rnn.pad_sequence
    return rows(ids, batch_first=True, padding_value=PADDING), rows(again, batch_first=True, padding_value=IGNORED)


def by_length(batch, cards):
    """Sort a batch by length and give each card a run of it, such that the busiest has as little as can be."""
    ids, again = batch
    lengths = (ids != PADDING).sum(1)
    order = lengths.argsort(descending=True)
    widths = lengths[order].tolist()
    low, high = widths[0], widths[0] * len(widths)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(run_ends(widths, middle)) <= len(cards) else (middle + 1, high)
    shards, start = [], 0
    for end in run_ends(widths, high):
        rows, width = order[start:end], widths[start]
        shards.append((ids[rows, :width], again[rows, :width]))
        start = end
    return shards + [None] * (len(cards) - len(shards))


def run_ends(widths: list[int], most: int) -> list[int]:
    """Where runs end whose rows times their longest are `most` at most; `widths` descend."""
    ends, start = [], 0
    for row in range(len(widths)):
        if (row + 1 - start) * widths[start] > most:
            ends.append(row)
            start = row
    return [*ends, len(widths)]


class Tagger(nn.Module):
    """A small Transformer; what stands at places of padding changes nothing elsewhere."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width, padding_idx=PADDING)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, ids):
        return self.head(self.layers(self.embedding(ids), src_key_padding_mask=ids == PADDING))


def loss_fn(model, batch):
    ids, again = batch
    total = F.cross_entropy(model(ids).transpose(1, 2), again, ignore_index=IGNORED, reduction="sum")
    return total, (again != IGNORED).sum()


def train(batches, cards: str, settings) -> dict:
    """Train over all batches; how long it took, and the losses."""
    parallel = mc.Parallel("manual", cards=cards, seed=0, **settings)
    torch.manual_seed(0)
    model = Tagger()
    model, optimizer = parallel.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    step = parallel.train_step(loss_fn, model, optimizer, graphs="off")  # shapes change with every batch
    step(batches[0])
    begun = time.perf_counter()
    losses = torch.stack([step(batch) for batch in batches]).tolist()  # tolist waits for the cards
    seconds = time.perf_counter() - begun
    parallel.check_lockstep(model)
    count = len(parallel.cards)
    parallel.close()
    return {"seconds": seconds, "losses": losses, "cards": count}


def evenly(batch, cards):
    """What every card gets without a split."""
    return list(zip(*(part.tensor_split(len(cards)) for part in batch), strict=True))


def busiest_card(shards) -> int:
    """Places that the card with most of them computes, padding included."""
    return max(shard[0].numel() for shard in shards if shard is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", default="all")
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    samples = make_samples(read_sentences(options.batches * options.batch_size))
    batches = list(DataLoader(samples, options.batch_size, collate_fn=pad))
    even = train(batches, options.cards, {"weights": [1] * len(mc.choose_cards(options.cards).cards)})
    bucketed = train(batches, options.cards, {"split": by_length})
    count = even["cards"]
    splits = {"even": evenly, "by_length": by_length}
    busiest = {
        name: sum(busiest_card(split(batch, range(count))) for batch in batches) for name, split in splits.items()
    }
    found = {
        "cards": count,
        "batches": len(batches),
        "words": sum(int((ids != PADDING).sum()) for ids, _ in batches),
        "places_on_the_busiest_card": busiest,
        "places_saved": 1 - busiest["by_length"] / busiest["even"],
        "seconds": {"even": even["seconds"], "by_length": bucketed["seconds"]},
        "speedup": even["seconds"] / bucketed["seconds"],
        "largest_loss_difference": max(abs(a - b) for a, b in zip(even["losses"], bucketed["losses"], strict=True)),
        "losses": [bucketed["losses"][0], bucketed["losses"][-1]],
    }
    if options.json:
        json.dump(found, sys.stdout, indent=1)
        print()
        return
    print(f"{len(batches)} batches on {count} cards, losses {found['losses'][0]:.3f} to {found['losses'][1]:.3f}")
    print(f"places computed on the busiest card: {busiest['even']:,} evenly, {busiest['by_length']:,} by length")
    print(f"that saves {found['places_saved']:.0%}; {found['speedup']:.2f} times as fast here")
    print(f"losses differ by {found['largest_loss_difference']:.1e} at most")


if __name__ == "__main__":
    main()
