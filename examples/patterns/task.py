"""What all patterns train: the model, the data, and the line that they print after each epoch.

scikit-learn's handwritten digits by default; with TASK=resnet50 in the environment, ResNet-50 on drawn images, which
keeps GPUs busy.
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset


def digits():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(images).float().div(16).view(-1, 1, 8, 8)[order]
    labels = torch.from_numpy(labels).long()[order]
    return TensorDataset(images[:1408], labels[:1408]), TensorDataset(images[1408:], labels[1408:])


def drawn(number):
    images = torch.randn(number, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    return TensorDataset(images, torch.arange(number) % 10)


if os.environ.get("TASK") == "resnet50":
    from torchvision.models import resnet50

    EPOCHS, BATCH, LEARNING_RATE = 3, 512, 0.01
    train_set, test_set = drawn(16 * BATCH), drawn(BATCH)

    def make_model():
        torch.manual_seed(0)
        return resnet50(num_classes=10)
else:
    EPOCHS, BATCH, LEARNING_RATE = 8, 128, 0.1
    train_set, test_set = digits()

    def make_model():
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(1, 32, 3, stride=2, padding=1), nn.GELU(), nn.Flatten()),
            *(nn.Linear(512, 256), nn.GELU(), nn.Linear(256, 10)),
        )


last = [time.perf_counter()]


def report(epoch, loss, accuracy):
    """Print an epoch's line, with the images a second since the line before."""
    now = time.perf_counter()
    speed = len(train_set) / (now - last[0])
    print(f"epoch {epoch}: loss {loss:.4f}, test accuracy {accuracy:.1%}, {speed:,.0f} images/s", flush=True)
    last[0] = time.perf_counter()
