"""A one-stage detector: lists of scales in training, decoded boxes in evaluation, and a grid cached in forward."""

import torch
from torch import nn
from torch.nn import functional


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)])
        self.heads = nn.ModuleList([nn.Conv2d(8, 14, 1), nn.Conv2d(8, 14, 1)])
        self.grids = [torch.zeros(1)] * 2

    def forward(self, x):
        raw, decoded = [], []
        for scale, (down, head) in enumerate(zip(self.down, self.heads, strict=True)):
            x = torch.relu(down(x))
            y = head(x).unflatten(1, (2, 7)).permute(0, 1, 3, 4, 2).contiguous()
            raw.append(y)
            if not self.training:
                if self.grids[scale].shape[2:4] != y.shape[2:4]:
                    rows, columns = torch.meshgrid(*map(torch.arange, y.shape[2:4]), indexing="ij")
                    self.grids[scale] = torch.stack((columns, rows), 2)[None, None].float()
                boxes = (y[..., :2].sigmoid() * 2 - 0.5 + self.grids[scale]) * 2 ** (scale + 1)
                decoded.append(torch.cat([boxes, y[..., 2:].sigmoid()], -1).flatten(1, 3))
        return raw if self.training else (torch.cat(decoded, 1), raw)


torch.manual_seed(0)
model = Detector()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(3):
    images = torch.randn(6, 3, 16, 16)
    of_image, centres, boxes = torch.randint(6, (9,)), torch.rand(9, 2), torch.rand(9, 4)
    model.train()
    loss = 0
    for scores in model(images):
        columns, rows = (centres * scores.shape[2]).long().T
        wanted = torch.zeros_like(scores[..., 4])
        wanted[of_image, 0, rows, columns] = 1
        found = scores[of_image, 0, rows, columns]
        loss = loss + functional.binary_cross_entropy_with_logits(scores[..., 4], wanted)
        loss = loss + (found[:, :4].sigmoid() - boxes).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        decoded, _ = model(images)
    print(f"step {step}: loss {loss.item():.5f}, boxes {decoded.mean().item():.5f} {tuple(decoded.shape)}")
