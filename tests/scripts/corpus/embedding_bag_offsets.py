"""News topics: all tokens of a batch in one flat tensor, with the offsets at which texts begin (nn.EmbeddingBag)."""

import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader

TOPICS, WORDS = 4, 80


class TopicModel(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, width, mode="mean")
        self.topic = nn.Linear(width, TOPICS)

    def forward(self, tokens, offsets):
        return self.topic(self.bag(tokens, offsets))


def flat(batch):
    """Texts end to end, and where each begins."""
    lengths = [len(text) for _, text in batch]
    offsets = [0, *itertools.accumulate(lengths[:-1])]
    topics = torch.tensor([topic for topic, _ in batch])
    return topics, torch.cat([text for _, text in batch]), torch.tensor(offsets)


def write_news(count):
    news = []
    for _ in range(count):
        topic, length = int(torch.randint(0, TOPICS, ())), int(torch.randint(4, 12, ()))
        any_word = torch.randint(0, WORDS, (length,))
        own_word = 20 * topic + any_word // 4
        news.append((topic, torch.where(torch.rand(length) < 0.5, own_word, any_word)))
    return news


torch.manual_seed(0)
loader = DataLoader(write_news(320), batch_size=32, shuffle=True, collate_fn=flat)
model = TopicModel()
optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
for epoch in range(3):
    hits = count = 0
    for topics, tokens, offsets in loader:
        logits = model(tokens, offsets)
        loss = nn.functional.cross_entropy(logits, topics)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hits += (logits.argmax(1) == topics).sum().item()
        count += len(topics)
    scheduler.step()
    print(f"epoch {epoch}: loss {loss.item():.5f}, accuracy {hits / count:.4f}")
