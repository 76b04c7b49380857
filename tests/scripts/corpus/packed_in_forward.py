"""Padded sequences and their lengths, packed in forward; the last hidden state is classified."""

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence


class LSTMClassifier(nn.Module):
    def __init__(self, input_size, hidden_size, classes):
        super().__init__()
        self.lstm = nn.LSTM(input_size, hidden_size, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(2 * hidden_size, classes)

    def forward(self, padded, lengths):
        packed = pack_padded_sequence(padded, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return self.fc(torch.cat([hidden[-2], hidden[-1]], dim=1))


def make_data(count):
    """The class of a sequence is where its largest value is: first, second or last third."""
    data = []
    for _ in range(count):
        length = int(torch.randint(3, 13, (1,)))
        sequence = torch.randn(length, 2)
        label = int(sequence[:, 0].argmax()) * 3 // length
        data.append((sequence, label))
    return data


def batches(data, size):
    for start in range(0, len(data), size):
        chunk = data[start : start + size]
        lengths = torch.tensor([len(sequence) for sequence, _ in chunk])
        padded = pad_sequence([sequence for sequence, _ in chunk], batch_first=True)
        yield padded, lengths, torch.tensor([label for _, label in chunk])


def main():
    torch.manual_seed(11)
    data = make_data(210)
    model = LSTMClassifier(2, 16, 3)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(3):
        for i, (padded, lengths, labels) in enumerate(batches(data, 32)):
            optimizer.zero_grad()
            loss = criterion(model(padded, lengths), labels)
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            if i % 3 == 0:
                print(f"[{epoch}:{i}] loss {loss.item():.5f} grad norm {grad_norm:.5f}")


main()
