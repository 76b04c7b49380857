"""A detector whose losses are means over all boxes of the batch, computed in forward: images weigh by their boxes."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class RoIHead(nn.Module):
    def __init__(self, num_classes=4):
        super().__init__()
        self.features = nn.Conv2d(1, 8, 3, padding=1)
        self.fc = nn.Linear(8, 16)
        self.cls_score, self.bbox_pred = nn.Linear(16, num_classes), nn.Linear(16, 4)

    def pool(self, feature, boxes):
        rows = [feature[:, y : y + h, x : x + w].mean((1, 2)) for x, y, w, h in boxes.tolist()]
        return torch.stack(rows)

    def forward(self, images, targets):
        pooled = []
        for image, target in zip(images, targets, strict=True):
            feature = F.relu(self.features(image[None]))[0]
            pooled.append(self.pool(feature, target["boxes"]))
        x = F.relu(self.fc(torch.cat(pooled)))
        labels = torch.cat([target["labels"] for target in targets])
        deltas = torch.cat([target["deltas"] for target in targets])
        return {
            "loss_classifier": F.cross_entropy(self.cls_score(x), labels),
            "loss_box_reg": F.smooth_l1_loss(self.bbox_pred(x), deltas),
        }


def sample(generator):
    side = int(torch.randint(8, 14, (1,), generator=generator))
    count = int(torch.randint(1, 8, (1,), generator=generator))
    corner = torch.randint(0, side - 4, (count, 2), generator=generator)
    size = torch.randint(2, 5, (count, 2), generator=generator)
    labels = torch.randint(0, 4, (count,), generator=generator)
    image = torch.rand(1, side, side, generator=generator)
    return image, {
        "boxes": torch.cat([corner, size], 1),
        "labels": labels,
        "deltas": labels[:, None] - size.repeat(1, 2) / 4,
    }


if __name__ == "__main__":
    torch.manual_seed(14)
    generator = torch.Generator().manual_seed(15)
    data = [sample(generator) for _ in range(40)]
    model = RoIHead()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.train()
    for it in range(12):
        batch = [data[(8 * it + k) % len(data)] for k in range(8)]
        loss_dict = model([image for image, _ in batch], [target for _, target in batch])
        losses = sum(loss_dict.values())
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        if it % 3 == 2:
            parts = "  ".join(f"{name}: {loss.item():.5f}" for name, loss in loss_dict.items())
            print(f"iter {it + 1}  loss: {losses.item():.5f}  {parts}")
