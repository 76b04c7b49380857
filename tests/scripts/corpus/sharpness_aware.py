"""SAM: an optimizer of one's own that climbs by the gradient, takes a second one there, and steps from the start."""

import torch
import torch.nn as nn


class SharpnessAware(torch.optim.SGD):
    """SGD by the gradient at the worst point near by."""

    def __init__(self, params, radius, **options):
        super().__init__(params, **options)
        self.radius = radius
        self.start = []

    def trained(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def climb(self):
        params = self.trained()
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        self.start = [p.clone() for p in params]
        for p in params:
            p.add_(p.grad, alpha=self.radius / (norm.item() + 1e-12))
        self.zero_grad()
        return norm

    @torch.no_grad()
    def descend(self):
        for p, start in zip(self.trained(), self.start, strict=True):
            p.copy_(start)
        self.step()
        self.zero_grad()


torch.manual_seed(86)
model = nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 3))
optimizer = SharpnessAware(model.parameters(), radius=0.1, lr=0.1, momentum=0.9)
x = torch.randn(180, 5)
y = (x[:, :3] ** 2).argmax(1)
for epoch in range(3):
    for xb, yb in zip(x.split(36), y.split(36), strict=True):
        loss = nn.functional.cross_entropy(model(xb), yb)
        loss.backward()
        norm = optimizer.climb()
        above = nn.functional.cross_entropy(model(xb), yb)
        above.backward()
        optimizer.descend()
    print(f"epoch {epoch}: loss {loss.item():.5f} at the worse point {above.item():.5f} norm {norm.item():.5f}")
