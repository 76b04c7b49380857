"""An nn.ModuleList model with a classifier after every stage: it returns (logits, [auxiliary logits])."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Stage(nn.Module):
    def __init__(self, cin, cout, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(cin, cout, 3, padding=1), nn.GroupNorm(4, cout), nn.ReLU())
        self.aux = nn.Linear(cout, classes)

    def forward(self, x):
        x = self.body(x)
        return x, self.aux(x.mean(-1))


class DeeplySupervised(nn.Module):
    def __init__(self, widths=(8, 12, 16), classes=3):
        super().__init__()
        widths = [1, *widths]
        self.stages = nn.ModuleList(Stage(widths[i], widths[i + 1], classes) for i in range(len(widths) - 1))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x):
        auxiliary = []
        for i, stage in enumerate(self.stages):
            x, aux = stage(x)
            if i < len(self.stages) - 1:
                auxiliary.append(aux)
        logits = self.head(x.amax(-1))
        return (logits, auxiliary) if self.training else logits


torch.manual_seed(26)
frequency = torch.randint(1, 4, (210,))
x = torch.sin(torch.arange(24) * frequency[:, None] / 3 + 6 * torch.rand(210, 1)).unsqueeze(1)
x = x + 0.2 * torch.randn_like(x)
y = frequency - 1

model = DeeplySupervised()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
for epoch in range(3):
    model.train()
    for index in torch.randperm(210).split(32):
        logits, auxiliary = model(x[index])
        main_loss = F.cross_entropy(logits, y[index])
        aux_losses = [F.cross_entropy(a, y[index]) for a in auxiliary]
        loss = main_loss + 0.3 * sum(aux_losses)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean()
    print(f"epoch {epoch}: main {main_loss:.5f} aux {[round(a.item(), 5) for a in aux_losses]} accuracy {accuracy:.4f}")
