"""Parameters used outside modules: a bare nn.Parameter, a weight used in the loss, an L2 penalty over all of them."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(5)

encoder = nn.Sequential(nn.Linear(9, 24), nn.ReLU(), nn.Linear(24, 6))
classifier = nn.Linear(6, 4, bias=False)
temperature = nn.Parameter(torch.tensor(1.5))
task_weights = nn.Parameter(torch.zeros(2))

optimizer = torch.optim.Adam(
    [
        {"params": encoder.parameters()},
        {"params": classifier.parameters(), "lr": 1e-3},
        {"params": [temperature, task_weights], "lr": 5e-3},
    ],
    lr=2e-3,
)

x = torch.randn(200, 9)
y = (x[:, :4] + 0.3 * torch.randn(200, 4)).argmax(1)

for step in range(30):
    index = torch.randint(0, 200, (40,))
    z = F.normalize(encoder(x[index]), dim=1)
    logits = F.linear(z, F.normalize(classifier.weight, dim=1)) / temperature.abs()
    classification = F.cross_entropy(logits, y[index])
    reconstruction = F.mse_loss(classifier(z), x[index][:, :4])
    precision = torch.exp(-task_weights)
    loss = (precision * torch.stack([classification, reconstruction]) + 0.5 * task_weights).sum()
    l2 = sum(p.pow(2).sum() for p in encoder.parameters())
    l1 = classifier.weight.abs().sum()
    loss = loss + 1e-3 * l2 + 1e-3 * l1
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"{step:3d} loss {loss.item():.5f} l2 {l2.item():.4f}", end=" ")
        print(f"T {temperature.item():.5f} grad {temperature.grad.item():.5f}")
print("task weights", [f"{w:.5f}" for w in task_weights.tolist()])
