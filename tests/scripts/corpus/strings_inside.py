"""A sentence encoder that takes a list of strings and makes its tensors itself, in forward."""

import torch
from torch import nn


class SentenceEncoder(nn.Module):
    def __init__(self, dim=16, buckets=200):
        super().__init__()
        self.buckets = buckets
        self.table = nn.EmbeddingBag(buckets, dim, mode="mean")
        self.project = nn.Linear(dim, dim)

    def tokenize(self, sentence):
        # character trigrams, hashed without Python's random hash
        padded = f"#{sentence.lower()}#"
        return [
            sum(ord(c) * 31**k for k, c in enumerate(padded[i : i + 3])) % self.buckets for i in range(len(padded) - 2)
        ]

    def forward(self, sentences):
        ids = [torch.tensor(self.tokenize(sentence)) for sentence in sentences]
        offsets = torch.tensor([0, *[len(i) for i in ids[:-1]]]).cumsum(0)
        return self.project(torch.tanh(self.table(torch.cat(ids), offsets)))


SUBJECTS = ["the cat", "my dog", "a bird", "the old man", "her sister"]
VERBS = {"likes": 1, "loves": 1, "enjoys": 1, "hates": 0, "fears": 0, "avoids": 0}
OBJECTS = ["the rain", "long walks", "loud music", "fresh bread"]
corpus = [(f"{s} {v} {o}", label) for s in SUBJECTS for v, label in VERBS.items() for o in OBJECTS]

torch.manual_seed(84)
encoder, classifier = SentenceEncoder(), nn.Linear(16, 2)
optimizer = torch.optim.Adam([*encoder.parameters(), *classifier.parameters()], lr=0.01)
for epoch in range(4):
    order = torch.randperm(len(corpus)).tolist()
    total = 0.0
    for start in range(0, len(order), 24):
        batch = [corpus[i] for i in order[start : start + 24]]
        logits = classifier(encoder([sentence for sentence, _ in batch]))
        loss = nn.functional.cross_entropy(logits, torch.tensor([label for _, label in batch]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(batch)
    print(f"epoch {epoch}: {total / len(corpus):.5f}")
with torch.no_grad():
    print([round(v, 4) for v in classifier(encoder(["the dog adores rain"]))[0].tolist()])
