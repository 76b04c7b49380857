"""Translation with attention: a decoder called word by word, its state (1, batch, hidden), all else batch first."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(25)
VOCAB, LENGTH, HIDDEN, START = 18, 5, 24, 0


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, HIDDEN)
        self.gru = nn.GRU(HIDDEN, HIDDEN, batch_first=True)

    def forward(self, source):
        memory, state = self.gru(self.words(source))
        return memory, state


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, HIDDEN)
        self.match = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gru = nn.GRU(2 * HIDDEN, HIDDEN, batch_first=True)
        self.out = nn.Linear(HIDDEN, VOCAB)

    def forward(self, word, state, memory):
        scores = memory @ self.match(state[-1]).unsqueeze(2)
        attention = F.softmax(scores, dim=1)
        context = (attention * memory).sum(dim=1, keepdim=True)
        output, state = self.gru(torch.cat([self.words(word), context], dim=2), state)
        return self.out(output), state, attention.squeeze(2)


def translate(source, target):
    """Logits for every word of `target`, each given the true words before it."""
    memory, state = encoder(source)
    word, steps = torch.full((len(source), 1), START), []
    for true_word in target.split(1, dim=1):
        logits, state, attention = decoder(word, state, memory)
        steps.append(logits)
        word = true_word
    return torch.cat(steps, dim=1), attention


encoder, decoder = Encoder(), Decoder()
optimizers = [torch.optim.Adam(part.parameters(), lr=5e-3) for part in (encoder, decoder)]
for step in range(1, 21):
    source = torch.randint(1, VOCAB, (14, LENGTH))
    target = source.flip(1)
    logits, attention = translate(source, target)
    loss = F.cross_entropy(logits.view(-1, VOCAB), target.reshape(-1))
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.5f} sharpest attention {attention.max().item():.5f}")
