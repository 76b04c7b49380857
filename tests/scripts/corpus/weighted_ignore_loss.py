"""Class weights and ignored targets: a cross entropy that divides by the weights of what is left of the batch."""

import torch
from torch import nn

torch.manual_seed(61)
NUM_CLASSES, IGNORE = 5, -100


class TokenTagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(60, 20)
        self.conv = nn.Conv1d(20, 20, kernel_size=3, padding=1)
        self.fc = nn.Linear(20, NUM_CLASSES)

    def forward(self, ids):
        h = self.emb(ids).transpose(1, 2)
        return self.fc(torch.relu(self.conv(h)).transpose(1, 2))


def make(count):
    ids = torch.randint(0, 60, (count, 10))
    tags = ((ids + ids.roll(1, dims=1)) % 9).clamp(max=NUM_CLASSES - 1)
    tags[torch.rand(count, 10) < 0.3] = IGNORE
    tags[::7] = IGNORE  # some sentences have no tag at all
    return ids, tags


ids, tags = make(240)
counts = torch.bincount(tags[tags != IGNORE], minlength=NUM_CLASSES).float()
weights = counts.sum() / (NUM_CLASSES * counts)
print("class weights", [round(w, 4) for w in weights.tolist()])

model = TokenTagger()
criterion = nn.CrossEntropyLoss(weight=weights, ignore_index=IGNORE)
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
for epoch in range(3):
    for batch, batch_tags in zip(ids.split(32), tags.split(32), strict=True):
        logits = model(batch)
        loss = criterion(logits.reshape(-1, NUM_CLASSES), batch_tags.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        predicted = model(ids).argmax(-1)
    kept = tags != IGNORE
    recall = [(predicted[kept & (tags == c)] == c).float().mean().item() for c in range(NUM_CLASSES)]
    print(f"epoch {epoch} loss {loss.item():.5f} balanced accuracy {sum(recall) / NUM_CLASSES:.4f}")
