"""A tagger that packs and pads again in forward: its output is as long as the longest sequence it was given."""

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

torch.manual_seed(2)
TAGS, VOCAB = 4, 40


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 16, batch_first=True, bidirectional=True)
        self.tag = nn.Linear(32, TAGS)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False)
        output, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.tag(output)


sentences = [torch.randint(1, VOCAB, (int(n),)) for n in torch.randint(2, 14, (180,))]
tags = [(sentence + torch.roll(sentence, 1)) % TAGS for sentence in sentences]

model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
criterion = nn.CrossEntropyLoss(ignore_index=-1)

for epoch in range(2):
    right = count = 0
    for start in range(0, len(sentences), 20):
        tokens = pad_sequence(sentences[start : start + 20], batch_first=True)
        target = pad_sequence(tags[start : start + 20], batch_first=True, padding_value=-1)
        lengths = torch.tensor([len(sentence) for sentence in sentences[start : start + 20]])
        logits = model(tokens, lengths)
        loss = criterion(logits.reshape(-1, TAGS), target.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept = target != -1
        right += (logits.argmax(-1)[kept] == target[kept]).sum().item()
        count += kept.sum().item()
    print(f"epoch {epoch} loss {loss.item():.5f} tag accuracy {right / count:.4f} over {count} tags")
