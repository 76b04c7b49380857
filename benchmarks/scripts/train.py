"""A plain single-card training script, timed: what people write, and what ``manycard run`` is measured on.

    python train.py --model resnet50 --batch 512
    python train.py --model resnet50 --batch 512 --data-parallel     # the same with nn.DataParallel

Prints the losses of the first steps, and samples/s after the warm-up. It knows nothing of manycard.
"""

import argparse
import json
import time

import torch
from torch import nn
from torch.nn import functional as F


def make_model(name):
    if name == "resnet50":
        import torchvision

        return torchvision.models.resnet50(), (3, 224, 224), 1000
    layers = [part for _ in range(6) for part in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(256, 10)), (256,), 10


parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=("resnet50", "mlp"), default="resnet50")
parser.add_argument("--batch", type=int, default=512)
parser.add_argument("--steps", type=int, default=28)
parser.add_argument("--warm-up", type=int, default=34)
parser.add_argument("--data-parallel", action="store_true")
options = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model, shape, classes = make_model(options.model)
model = model.to(device)
if len(shape) == 3:
    model = model.to(memory_format=torch.channels_last)
if options.data_parallel:
    model = nn.DataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
images = torch.randn(options.batch, *shape, device=device)
if len(shape) == 3:
    images = images.to(memory_format=torch.channels_last)
labels = torch.randint(0, classes, (options.batch,), device=device)

losses = []
for step in range(options.warm_up + options.steps):
    if step == options.warm_up:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    if step < 5:
        losses.append(loss.item())
if device.type == "cuda":
    torch.cuda.synchronize()
seconds = time.perf_counter() - start
print(json.dumps({"samples_per_s": options.steps * options.batch / seconds, "losses": losses}))
