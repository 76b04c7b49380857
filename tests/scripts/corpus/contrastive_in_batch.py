"""SimCLR-like training: two views, an NT-Xent loss whose negatives are all the other samples of the batch."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SimCLR(nn.Module):
    def __init__(self, features=16, hidden=32, projection=8):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.projector = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, projection))

    def forward(self, x):
        h = self.backbone(x)
        return h, self.projector(h)


def nt_xent(z1, z2, temperature=0.5):
    z = F.normalize(torch.cat([z1, z2]), dim=1)
    n = z1.size(0)
    similarity = z @ z.T / temperature
    similarity.fill_diagonal_(float("-inf"))
    targets = torch.arange(2 * n, device=z.device).roll(n)
    return F.cross_entropy(similarity, targets)


def augment(x, generator):
    return x + 0.3 * torch.randn(x.shape, generator=generator)


def main():
    torch.manual_seed(12)
    generator = torch.Generator().manual_seed(34)
    data = torch.randn(256, 16) @ torch.diag(torch.linspace(0.2, 2, 16))
    model = SimCLR()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-6)
    for epoch in range(1, 4):
        losses = []
        for x in data[torch.randperm(256)].split(32):
            _, z1 = model(augment(x, generator))
            _, z2 = model(augment(x, generator))
            loss = nt_xent(z1, z2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: nt-xent {sum(losses) / len(losses):.5f} (last {losses[-1]:.5f})")
    with torch.no_grad():
        h, _ = model(data)
    print(f"feature std {h.std(0).mean().item():.5f}")


if __name__ == "__main__":
    main()
