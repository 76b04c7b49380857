"""A makemore-like bigram model: logits start at zero, and the loss inside is a mean over letters without padding."""

import torch
import torch.nn as nn
from torch.nn import functional as F

NAMES = "emma olivia ava isabella sophia mia amelia harper evelyn abigail emily ella elizabeth camila luna sofia"


class Words(torch.utils.data.Dataset):
    def __init__(self, words):
        self.words, self.longest = words, max(map(len, words))

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        letters = torch.tensor([ord(letter) - ord("a") + 1 for letter in self.words[index]])
        x, y = torch.zeros(self.longest + 1, dtype=torch.long), torch.zeros(self.longest + 1, dtype=torch.long)
        x[1 : 1 + len(letters)] = letters
        y[: len(letters)] = letters
        y[len(letters) + 1 :] = -1
        return x, y


class Bigram(nn.Module):
    def __init__(self, letters):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros((letters, letters)))

    def forward(self, idx, targets=None):
        logits = self.logits[idx]
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


torch.manual_seed(3407)
dataset = Words(NAMES.split())
loader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True)
model = Bigram(27)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.01, betas=(0.9, 0.99), eps=1e-8)
for epoch in range(10):
    for X, Y in loader:
        logits, loss = model(X, Y)
        model.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} | loss {loss.item():.4f}")

with torch.inference_mode():
    probs = F.softmax(model(torch.arange(27)[:, None])[0][:, -1], dim=-1)
    print(
        f"after m: {probs[13].topk(2).indices.tolist()}, mean entropy {-(probs * probs.log()).sum(1).mean().item():.4f}"
    )
