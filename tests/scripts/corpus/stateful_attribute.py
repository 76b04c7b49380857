"""An LSTM that keeps its state as an attribute: forward reads and writes it, the loop resets and detaches it."""

import torch
import torch.nn as nn

torch.manual_seed(1)
WORDS, TAGS = 30, 4


class StreamTagger(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.size = size
        self.words = nn.Embedding(WORDS, size)
        self.lstm = nn.LSTM(size, size, batch_first=True)
        self.tag = nn.Linear(size, TAGS)
        self.state = None

    def reset(self, batch):
        self.state = torch.zeros(1, batch, self.size), torch.zeros(1, batch, self.size)

    def detach(self):
        self.state = tuple(part.detach() for part in self.state)

    def forward(self, chunk):
        hidden, self.state = self.lstm(self.words(chunk), self.state)
        return self.tag(hidden)


streams = torch.randint(0, WORDS, (20, 60))
tags = streams.cumsum(1) % 4 // 2 + (streams > 20)
model = StreamTagger()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(2):
    model.reset(len(streams))
    for chunk, wanted in zip(streams.split(10, dim=1), tags.split(10, dim=1), strict=True):
        model.detach()
        loss = nn.functional.cross_entropy(model(chunk).transpose(1, 2), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    hidden = model.state[0]
    print(f"epoch {epoch} loss {loss.item():.5f} state {hidden.norm().item():.5f} {tuple(hidden.shape)}")
