"""No module of one's own: loose layers called in turn by a function, an optimizer over a list of their parameters."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(75)
emb = nn.Embedding(27, 8)
lin1 = nn.Linear(3 * 8, 40)
ln = nn.LayerNorm(40)
lin2 = nn.Linear(40, 27)
layers = [emb, lin1, ln, lin2]
parameters = [p for layer in layers for p in layer.parameters()]
print(sum(p.nelement() for p in parameters), "parameters in total")
optimizer = torch.optim.SGD(parameters, lr=0.1)


def forward(x):
    e = emb(x).view(x.shape[0], -1)
    return lin2(torch.tanh(ln(lin1(e))))


names = ["anna", "berta", "clara", "doris", "emma", "frieda", "greta", "hanna", "ida", "johanna", "lina", "martha"] * 2
contexts, targets = [], []
for name in names:
    letters = [0, 0, 0, *(ord(letter) - 96 for letter in name), 0]
    for i in range(3, len(letters)):
        contexts.append(letters[i - 3 : i])
        targets.append(letters[i])
X, Y = torch.tensor(contexts), torch.tensor(targets)

for i in range(40):
    index = torch.randint(0, len(X), (32,))
    loss = F.cross_entropy(forward(X[index]), Y[index])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if i % 10 == 0:
        print(f"{i:3d} {loss.item():.5f}")
with torch.no_grad():
    print("full loss", round(F.cross_entropy(forward(X), Y).item(), 5))
