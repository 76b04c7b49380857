"""A loss that is a sum, not a mean: gradients grow with the batch, and the last batch of an epoch is smaller."""

import torch
import torch.nn as nn
import torch.optim as optim

torch.manual_seed(0)
N, D = 170, 5
X = torch.randn(N, D)
true_w = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0])
Y = torch.poisson(torch.exp(0.2 * X @ true_w))

net = nn.Sequential(nn.Linear(D, 16), nn.Tanh(), nn.Linear(16, 1))
nll = nn.PoissonNLLLoss(reduction="sum")
opt = optim.SGD(net.parameters(), lr=5e-4)

for epoch in range(6):
    perm = torch.randperm(N)
    epoch_loss = 0.0
    for i in range(0, N, 25):
        idx = perm[i : i + 25]
        opt.zero_grad()
        loss = nll(net(X[idx]).squeeze(-1), Y[idx])
        loss.backward()
        opt.step()
        epoch_loss += loss.item()
    gn = max(p.grad.abs().max().item() for p in net.parameters())
    print(f"epoch {epoch}: total nll {epoch_loss:.4f}, largest gradient of the last batch {gn:.5f}")
