"""Segmentation: a small U-Net, 4-D outputs in a dict {"out", "aux"}, an IoU from whole predictions."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def double_conv(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.GroupNorm(2, cout), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.down1, self.down2 = double_conv(1, 8), double_conv(8, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.fuse = double_conv(16, 8)
        self.classifier = nn.Conv2d(8, classes, 1)
        self.aux_classifier = nn.Conv2d(16, classes, 1)

    def forward(self, x):
        skip = self.down1(x)
        deep = self.down2(F.max_pool2d(skip, 2))
        out = self.classifier(self.fuse(torch.cat([skip, self.up(deep)], dim=1)))
        aux = F.interpolate(self.aux_classifier(deep), size=x.shape[-2:], mode="bilinear", align_corners=False)
        return {"out": out, "aux": aux}


class Shapes(torch.utils.data.Dataset):
    """A bright square and a dark bar on noise."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        image, mask = 0.2 * torch.randn(1, 16, 16, generator=g), torch.zeros(16, 16, dtype=torch.long)
        r, c = torch.randint(0, 10, (2,), generator=g).tolist()
        image[0, r : r + 6, c : c + 6] += 1
        mask[r : r + 6, c : c + 6] = 1
        image[0, :, c // 2] -= 1
        mask[:, c // 2] = 2
        return image, mask


def criterion(inputs, target):
    losses = {name: F.cross_entropy(x, target, ignore_index=255) for name, x in inputs.items()}
    return losses["out"] + 0.5 * losses["aux"]


def mean_iou(prediction, target, classes=3):
    ious = []
    for c in range(classes):
        union = ((prediction == c) | (target == c)).sum().item()
        ious.append(((prediction == c) & (target == c)).sum().item() / max(union, 1))
    return sum(ious) / classes


torch.manual_seed(6)
train = torch.utils.data.DataLoader(Shapes(90), batch_size=15)
model = UNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for epoch in range(2):
    model.train()
    for images, masks in train:
        loss = criterion(model(images), masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.inference_mode():
        images, masks = next(iter(train))
        out = model(images)["out"]
    iou = mean_iou(out.argmax(1), masks)
    print(f"epoch {epoch}: loss {loss.item():.5f} logits {out.abs().mean().item():.5f} mIoU {iou:.3f}")
