"""No modules at all: tensors with requires_grad, matrix products, an update by hand."""

import torch
import torch.nn.functional as F

g = torch.Generator().manual_seed(11)
C = torch.randn((12, 4), generator=g)
W1 = torch.randn((8, 30), generator=g) * 0.3
b1 = torch.randn(30, generator=g) * 0.01
W2 = torch.randn((30, 12), generator=g) * 0.1
b2 = torch.zeros(12)
parameters = [C, W1, b1, W2, b2]
for p in parameters:
    p.requires_grad = True

X = torch.randint(0, 12, (300, 2), generator=g)
Y = (X[:, 0] + 2 * X[:, 1]) % 12

for i in range(60):
    ix = torch.randint(0, 300, (50,), generator=g)
    h = torch.tanh(C[X[ix]].view(-1, 8) @ W1 + b1)
    loss = F.cross_entropy(h @ W2 + b2, Y[ix])
    for p in parameters:
        p.grad = None
    loss.backward()
    lr = 0.1 if i < 40 else 0.01
    for p in parameters:
        p.data += -lr * p.grad
    if i % 12 == 0:
        print(f"{i}: {loss.item():.5f}")
print("norms", [round(p.norm().item(), 4) for p in parameters])
