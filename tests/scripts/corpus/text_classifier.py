"""Text classification: token ids padded by a collate function, lengths beside them, a masked mean of embeddings."""

import random

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

VOCAB = 120
PAD = 0


def make_corpus(size, seed):
    """Sentences whose class is the third of the vocabulary that most of its words come from."""
    rng = random.Random(seed)
    corpus = []
    for _ in range(size):
        label = rng.randrange(3)
        length = rng.randint(3, 20)
        words = [
            rng.randint(1 + 39 * label, 39 + 39 * label) if rng.random() < 0.6 else rng.randint(1, VOCAB - 1)
            for _ in range(length)
        ]
        corpus.append((words, label))
    return corpus


def collate(batch):
    texts, labels = zip(*batch, strict=True)
    lengths = torch.tensor([len(text) for text in texts])
    tokens = pad_sequence([torch.tensor(text) for text in texts], batch_first=True, padding_value=PAD)
    return tokens, lengths, torch.tensor(labels)


class TextClassifier(nn.Module):
    def __init__(self, vocab, dim, classes):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.fc = nn.Sequential(nn.Linear(dim, 32), nn.Tanh(), nn.Linear(32, classes))

    def forward(self, tokens, lengths):
        embedded = self.embedding(tokens)
        mean = embedded.sum(dim=1) / lengths.unsqueeze(1).float()
        return self.fc(mean)


def evaluate(model, loader, criterion):
    model.eval()
    total_loss, total_correct, total = 0.0, 0, 0
    with torch.no_grad():
        for tokens, lengths, labels in loader:
            logits = model(tokens, lengths)
            total_loss += criterion(logits, labels).item() * labels.size(0)
            total_correct += (logits.argmax(1) == labels).sum().item()
            total += labels.size(0)
    return total_loss / total, total_correct / total


if __name__ == "__main__":
    torch.manual_seed(3)
    train_loader = DataLoader(make_corpus(500, seed=1), batch_size=32, shuffle=True, collate_fn=collate)
    valid_loader = DataLoader(make_corpus(150, seed=2), batch_size=64, collate_fn=collate)
    model = TextClassifier(VOCAB, 24, 3)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(1, 4):
        model.train()
        for tokens, lengths, labels in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(tokens, lengths), labels)
            loss.backward()
            optimizer.step()
        valid_loss, accuracy = evaluate(model, valid_loader, criterion)
        print("-" * 60)
        print(f"| end of epoch {epoch} | train {loss.item():8.5f} | valid {valid_loss:8.5f} | acc {accuracy:.3f}")
    print("padding row:", model.embedding.weight[PAD].abs().sum().item())
