"""The kernel in Triton's interpreter, which runs it on the CPU: the same windows as by matrix products."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from manycard.data.image_files.augment import CentreCrop, RandomResizedCrop
from manycard.data.image_files.batched import show_by_products
from manycard.data.image_files.recipe import Recipe
from manycard.data.image_files.window_kernel import show_by_kernel

torch.manual_seed(0)
for augment, dtype, allowed in [
    (RandomResizedCrop(), torch.float32, 1e-5),
    (CentreCrop(), torch.bfloat16, 0.02),
    (CentreCrop(), torch.uint8, 1.0),
]:
    recipe, images, views = Recipe((7, 5), augment, dtype=dtype), [], []
    for seed in range(8):
        width, height = (int(side) for side in torch.randint(4, 40, (2,)))
        upright = (width, height) if seed < 4 else (height, width)
        images.append(torch.randint(0, 256, (3, height, width), dtype=torch.uint8))
        views.append(augment.view(seed, *upright, recipe.size).in_stored(seed + 1, *upright))
    found, expected = show_by_kernel(images, views, recipe), show_by_products(images, views, recipe)
    assert found.dtype == dtype and found.shape == (8, 3, 7, 5)
    difference = (found.float() - expected.float()).abs()
    assert difference.max() <= allowed, (augment, dtype, difference.amax((1, 2, 3)))
    assert dtype != torch.uint8 or difference.mean() < 0.01  # halves are rounded to another side
print("same")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_gives_the_windows_of_the_products() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "same", done.stderr
