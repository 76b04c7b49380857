"""Speech recognition with CTC: batch first in, (time, batch, classes) out as the loss wants it, lengths beside."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class AcousticModel(nn.Module):
    def __init__(self, mels=6, hidden=20, classes=5):
        super().__init__()
        self.conv = nn.Conv1d(mels, hidden, 3, stride=2, padding=1)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, classes)

    def forward(self, spectrogram, lengths):
        h = torch.relu(self.conv(spectrogram.transpose(1, 2))).transpose(1, 2)
        h, _ = self.rnn(h)
        return F.log_softmax(self.fc(h), dim=-1).transpose(0, 1), (lengths + 1) // 2


def utterances(count, templates):
    batch, targets, lengths, target_lengths = torch.zeros(count, 24, 6), [], [], []
    for i in range(count):
        symbols = torch.randint(1, 5, (int(torch.randint(2, 4, (1,))),))
        for k, symbol in enumerate(symbols):
            batch[i, 8 * k : 8 * k + 8] = templates[symbol]
        targets.append(symbols)
        lengths.append(8 * len(symbols))
        target_lengths.append(len(symbols))
    batch += 0.1 * torch.randn_like(batch)
    return batch, torch.cat(targets), torch.tensor(lengths), torch.tensor(target_lengths)


torch.manual_seed(106)
templates = torch.randn(5, 6)
model = AcousticModel()
criterion = nn.CTCLoss(blank=0, zero_infinity=True)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(1, 19):
    spectrogram, targets, lengths, target_lengths = utterances(16, templates)
    log_probs, output_lengths = model(spectrogram, lengths)
    loss = criterion(log_probs, targets, output_lengths, target_lengths)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        blank = log_probs[..., 0].exp().mean()
        print(f"step {step} ctc {loss.item():.5f} frames {log_probs.shape[0]} blank {blank.item():.5f}")
