"""A character RNN, sequence first: input (seq, batch), hidden (layers, batch, hidden) carried and detached."""

import torch
import torch.nn as nn

text = (
    "the quick brown fox jumps over the lazy dog. pack my box with five dozen liquor jugs. "
    "how vexingly quick daft zebras jump! the five boxing wizards jump quickly. "
) * 12
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text])

BATCH, BPTT, HIDDEN, LAYERS = 10, 16, 32, 2

torch.manual_seed(42)


def batchify(data, batch):
    steps = data.size(0) // batch
    return data[: steps * batch].view(batch, steps).t().contiguous()


class CharRNN(nn.Module):
    def __init__(self, vocab, hidden, layers):
        super().__init__()
        self.hidden_size, self.layers = hidden, layers
        self.embed = nn.Embedding(vocab, hidden)
        self.rnn = nn.GRU(hidden, hidden, layers)
        self.out = nn.Linear(hidden, vocab)

    def forward(self, x, hidden):
        output, hidden = self.rnn(self.embed(x), hidden)
        return self.out(output), hidden

    def init_hidden(self, batch):
        return torch.zeros(self.layers, batch, self.hidden_size)


model = CharRNN(len(chars), HIDDEN, LAYERS)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
criterion = nn.CrossEntropyLoss()
source = batchify(data, BATCH)

for epoch in range(2):
    hidden = model.init_hidden(BATCH)
    total = 0.0
    for step, i in enumerate(range(0, source.size(0) - 1, BPTT)):
        length = min(BPTT, source.size(0) - 1 - i)
        x, y = source[i : i + length], source[i + 1 : i + 1 + length]
        hidden = hidden.detach()
        optimizer.zero_grad()
        output, hidden = model(x, hidden)
        loss = criterion(output.view(-1, len(chars)), y.reshape(-1))
        loss.backward()
        optimizer.step()
        total += loss.item()
        if step % 5 == 0:
            print(f"epoch {epoch} step {step:2d} loss {loss.item():.5f}")
    print(f"epoch {epoch} mean loss {total / (step + 1):.5f} hidden norm {hidden.norm().item():.5f}")
