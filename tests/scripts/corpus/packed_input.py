"""Sequences packed by the collate function: the module is called with a PackedSequence."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset


class Sums(Dataset):
    """Is the sum of a sequence positive?"""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(5)
        lengths = torch.randint(2, 15, (size,), generator=generator)
        self.items = [torch.randn(int(length), 3, generator=generator) for length in lengths]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        item = self.items[index]
        return item, float(item.sum() > 0)


def collate(batch):
    sequences = [sequence for sequence, _ in batch]
    labels = torch.tensor([label for _, label in batch])
    return pack_sequence(sequences, enforce_sorted=False), labels


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 16, batch_first=True)
        self.head = nn.Linear(16, 1)

    def forward(self, packed):
        _, last = self.gru(packed)
        return self.head(last[-1]).squeeze(-1)


torch.manual_seed(0)
loader = DataLoader(Sums(240), batch_size=24, shuffle=True, collate_fn=collate)
model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loss_fn = nn.BCEWithLogitsLoss()

for epoch in range(3):
    losses, hits = [], 0
    for packed, labels in loader:
        logits = model(packed)
        loss = loss_fn(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        hits += int(((logits > 0).float() == labels).sum())
    print(f"epoch {epoch}: loss={sum(losses) / len(losses):.5f} accuracy={hits / 240:.4f}")
