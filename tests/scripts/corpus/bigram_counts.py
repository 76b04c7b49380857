"""A table of which letter follows which: all zero at first, its loss a mean over letters, without the padding."""

import torch

TEXT = "emma olivia ava isabella sophia mia amelia harper evelyn abigail emily ella elizabeth camila luna sofia"
NAMES = TEXT.split()
END, NOTHING = 26, -1


class Following(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(27, 27))

    def forward(self, letters, following):
        scores = self.table[letters]
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten(), ignore_index=NOTHING)
        return {"scores": scores, "loss": loss}


def padded(name, longest):
    word = [ord(letter) - ord("a") for letter in name]
    rest = longest - len(word)
    return [END, *word] + [END] * rest, [*word, END] + [NOTHING] * rest


torch.manual_seed(7)
longest = max(len(name) for name in NAMES)
pairs = torch.tensor([padded(name, longest) for name in NAMES])
model = Following()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for epoch in range(10):
    total = 0.0
    for rows in torch.randperm(len(pairs)).split(6):
        out = model(pairs[rows, 0], pairs[rows, 1])
        optimizer.zero_grad()
        out["loss"].backward()
        optimizer.step()
        total += out["loss"].item()
    print(f"epoch {epoch} loss {total / 3:.5f} size {model.table.norm().item():.4f}")
print("after e:", [chr(ord("a") + place) for place in model.table[4, :26].topk(2).indices.tolist()])
