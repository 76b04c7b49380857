"""A detector as in torchvision: lists of images and of dicts in, a dict of losses out; each image weighs the same."""

import torch
import torch.nn.functional as F
from torch import nn


class Detector(nn.Module):
    """Scores every cell of a feature map, and regresses a box from it."""

    def __init__(self, classes=3):
        super().__init__()
        self.classes = classes
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.ReLU()
        )
        self.cls_head, self.box_head = nn.Conv2d(12, classes, 1), nn.Conv2d(12, 4, 1)

    def forward(self, images, targets=None):
        if self.training and targets is None:
            raise ValueError("targets should not be None in training mode")
        outputs = [self.single(image) for image in images]
        if self.training:
            return self.compute_loss(outputs, targets)
        return [self.detect(scores, boxes) for scores, boxes in outputs]

    def single(self, image):
        features = self.backbone(image.unsqueeze(0))
        return self.cls_head(features).squeeze(0).flatten(1).t(), self.box_head(features).squeeze(0).flatten(1).t()

    def compute_loss(self, outputs, targets):
        classification, regression = [], []
        for (scores, boxes), target in zip(outputs, targets, strict=True):
            matched = torch.linspace(0, len(scores) - 1, len(target["labels"])).long()
            wanted = torch.zeros_like(scores)
            wanted[matched, target["labels"]] = 1.0
            foreground = len(matched)
            classification.append(F.binary_cross_entropy_with_logits(scores, wanted, reduction="sum") / foreground)
            regression.append(F.l1_loss(boxes[matched], target["boxes"], reduction="sum") / foreground)
        return {
            "classification": sum(classification) / len(targets),
            "bbox_regression": sum(regression) / len(targets),
        }

    def detect(self, scores, boxes):
        best = scores.sigmoid().amax(1).topk(2)
        return {"boxes": boxes[best.indices], "scores": best.values}


def make_sample():
    height, width = (4 * torch.randint(3, 7, (2,))).tolist()
    count = int(torch.randint(1, 4, (1,)))
    target = {"boxes": torch.rand(count, 4), "labels": torch.randint(0, 3, (count,))}
    return torch.rand(3, height, width), target


def collate_fn(batch):
    return tuple(zip(*batch, strict=True))


torch.manual_seed(31)
dataset = [make_sample() for _ in range(30)]
data_loader = torch.utils.data.DataLoader(dataset, batch_size=6, shuffle=True, collate_fn=collate_fn)
model = Detector()
params = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=0.0005)

for epoch in range(2):
    model.train()
    for images, targets in data_loader:
        loss_dict = model(list(images), [dict(target) for target in targets])
        losses = sum(loss for loss in loss_dict.values())
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
    print(f"Epoch {epoch}", {name: round(loss.item(), 5) for name, loss in loss_dict.items()})

model.eval()
with torch.no_grad():
    detections = model([image for image, _ in dataset[:5]])
print("scores", [[round(s, 5) for s in detection["scores"].tolist()] for detection in detections])
