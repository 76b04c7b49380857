"""Every kind of file comes out as what it shows, within what its compression and the decoders allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from manycard.data.image_files.augment import CentreCrop, RandomResizedCrop
from manycard.data.image_files.decode import decode, read_file
from manycard.data.image_files.header import BadImage
from manycard.data.image_files.recipe import Recipe
from tests.unit.data.image_files import odd

EVALUATION = Recipe((64, 64), CentreCrop(), dtype=torch.uint8)
TRAINING = Recipe((64, 64), RandomResizedCrop(), dtype=torch.uint8)


def by_torchvision(image: Any, recipe: Recipe, seed: int) -> Tensor:
    """What torchvision's transforms on Pillow images give for a sample's view."""
    view = recipe.augment.view(seed, image.width, image.height, recipe.size)
    left, top, width, height = view.box
    part = v2.functional.crop(image, top, left, height, width)
    part = v2.functional.resize(part, list(view.resized))
    part = v2.functional.crop(part, *view.inside, *view.size)
    found = v2.functional.pil_to_tensor(v2.functional.hflip(part) if view.mirrored else part)
    assert found.shape == (3, *recipe.size)
    return found


def difference(one: Tensor, other: Tensor) -> float:
    """Mean difference, in levels of 255."""
    return float((one.float() - other.float()).abs().mean())


@pytest.mark.parametrize("recipe", [EVALUATION, TRAINING], ids=["evaluation", "training"])
@pytest.mark.parametrize("kind", odd.KINDS)
def test_kinds_of_files(kind: str, recipe: Recipe, tmp_path: Path) -> None:
    path, image = odd.write(kind, tmp_path)
    allowed = {"webp": 3.0, "cmyk": 3.0}.get(kind, 2.0)
    for seed in range(4):
        assert difference(decode(read_file(path), seed, recipe), by_torchvision(image, recipe, seed)) < allowed


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_files(orientation: int, tmp_path: Path) -> None:
    path, image = odd.write_turned(orientation, tmp_path)
    for seed in range(6):
        found = decode(read_file(path), seed, TRAINING)
        assert difference(found, by_torchvision(image, TRAINING, seed)) < 2.0


@pytest.mark.parametrize("size", [48, 128, 224, 400])
def test_reduced_decoding_is_close(size: int, paths: list[str], tmp_path: Path) -> None:
    """Sizes at which the decoder is asked for 1/8 to 1/1 of the image."""
    image = odd.photograph().resize((1600, 1200))
    path = tmp_path / "large.jpg"
    image.save(path, quality=92)
    for augment in (CentreCrop(), RandomResizedCrop()):
        recipe = Recipe((size, size), augment, dtype=torch.uint8)
        for seed in range(4):
            assert difference(decode(read_file(str(path)), seed, recipe), by_torchvision(image, recipe, seed)) < 2.0


def test_a_plain_photograph_is_that_of_torchvision(paths: list[str]) -> None:
    from PIL import Image

    for seed, path in enumerate(paths[:8]):
        found = decode(read_file(path), seed, Recipe((224, 224), RandomResizedCrop(), dtype=torch.uint8))
        expected = by_torchvision(Image.open(path), Recipe((224, 224), RandomResizedCrop()), seed)
        assert difference(found, expected) < 0.7
        assert int((found.int() - expected.int()).abs().max()) < 16


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "png-cut", "png-flipped", "gone", "folder"])
def test_bad_files_say_why(damage: str, tmp_path: Path, paths: list[str]) -> None:
    data = Path(paths[0]).read_bytes()
    path = tmp_path / "bad.jpg"
    if damage.startswith("png"):
        odd.photograph().save(tmp_path / "good.png")
        data = (tmp_path / "good.png").read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 0xFF
    contents = {"cut": data[: len(data) // 2], "empty": b"", "text": b"hello " * 99, "png-cut": data[: len(data) // 2]}
    if damage == "folder":
        path.mkdir()
    elif damage != "gone":
        path.write_bytes(contents.get(damage, bytes(flipped)))
    with pytest.raises(BadImage, match=r"\w"):
        decode(read_file(str(path)), 0, TRAINING)


def test_sixteen_bits_keep_their_higher_half(tmp_path: Path) -> None:
    path, image = odd.write("png16-grey", tmp_path)
    whole = Recipe((427, 640), RandomResizedCrop(scale=(1.0, 1.0), ratio=(640 / 427, 640 / 427), mirror=0.0),
                   dtype=torch.uint8)  # fmt: skip
    assert np.array_equal(decode(read_file(path), 0, whole).permute(1, 2, 0).numpy(), np.asarray(image))
