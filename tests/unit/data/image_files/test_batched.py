"""The batched pass gives what PyTorch's antialiased resizing gives, image by image."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional as F

from manycard.data.image_files import batched
from manycard.data.image_files.augment import Augment, CentreCrop, RandomResizedCrop
from manycard.data.image_files.decode import turn
from manycard.data.image_files.recipe import IMAGENET_MEAN, IMAGENET_STD, Recipe
from manycard.data.image_files.view import View


def one_by_one(image: torch.Tensor, view: View) -> torch.Tensor:
    box, (top, left), (height, width) = view.box, view.inside, view.size
    part = image[None, :, box.top : box.top + box.height, box.left : box.left + box.width].float()
    part = F.interpolate(part, size=view.resized, mode="bilinear", antialias=True)[0]
    return turn(part[:, top : top + height, left : left + width], view)


def case(augment: Augment, size: tuple[int, int], images: int) -> tuple[list[torch.Tensor], list[View]]:
    """Images of many sizes in all orientations, some smaller than what is shown."""
    draw = random.Random(0)
    stored, views = [], []
    for seed in range(images):
        width, height, orientation = draw.randint(30, 400), draw.randint(30, 400), 1 + seed % 8
        upright = augment.view(seed, width, height, size)
        views.append(upright.in_stored(orientation, width, height))
        shape = (height, width) if orientation < 5 else (width, height)
        stored.append(torch.randint(0, 256, (3, *shape), dtype=torch.uint8))
    return stored, views


@pytest.mark.parametrize("limit", [2**28, 400_000], ids=["one group", "many groups"])
@pytest.mark.parametrize("augment", [RandomResizedCrop(), CentreCrop()], ids=["training", "evaluation"])
def test_same_as_one_by_one(augment: Augment, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched, "_PADDED_BYTES", limit)
    size = (48, 56)
    images, views = case(augment, size, 24)
    found = batched.show(images, views, Recipe(size, augment))
    scale, shift = torch.tensor(IMAGENET_STD).view(3, 1, 1) * 255, torch.tensor(IMAGENET_MEAN).view(3, 1, 1) * 255
    assert found.shape == (24, 3, 48, 56)
    for row, image, view in zip(found, images, views, strict=True):
        # 0.01 of 255 levels: nothing is rounded in between.
        torch.testing.assert_close(row * scale + shift, one_by_one(image, view), atol=0.01, rtol=0)


def test_bytes_are_rounded() -> None:
    images, views = case(RandomResizedCrop(), (32, 32), 8)
    found = batched.show(images, views, Recipe((32, 32), RandomResizedCrop(), dtype=torch.uint8))
    assert found.dtype == torch.uint8
    for row, image, view in zip(found, images, views, strict=True):
        assert (row.float() - one_by_one(image, view)).abs().max() < 0.51


def test_a_constant_image_stays_constant() -> None:
    """Padding must not darken edges."""
    images = [torch.full((3, 20 + 7 * row, 90 - 7 * row), 200, dtype=torch.uint8) for row in range(8)]
    views = [RandomResizedCrop().view(row, 90 - 7 * row, 20 + 7 * row, (40, 40)) for row in range(8)]
    found = batched.show(images, views, Recipe((40, 40), RandomResizedCrop(), dtype=torch.uint8))
    assert torch.equal(found, torch.full_like(found, 200))
