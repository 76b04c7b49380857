"""Views are functions of seed and size, and have the distributions of torchvision's transforms."""

from __future__ import annotations

import math

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from manycard.data.image_files import CentreCrop, RandomResizedCrop
from manycard.errors import SettingError

SIZE = (224, 224)


def test_a_seed_gives_one_view() -> None:
    augment = RandomResizedCrop()
    views = [augment.view(seed, 500, 375, SIZE) for seed in range(50)]
    assert views == [RandomResizedCrop().view(seed, 500, 375, SIZE) for seed in range(50)]
    assert len(set(views)) == 50


def test_boxes_lie_inside_and_keep_to_the_limits() -> None:
    augment = RandomResizedCrop(scale=(0.25, 0.5), ratio=(0.5, 2.0))
    for seed in range(500):
        box = augment.view(seed, 500, 375, SIZE).box
        assert 0 <= box.left <= 500 - box.width
        assert 0 <= box.top <= 375 - box.height
        assert 0.24 < box.width * box.height / (500 * 375) < 0.51
        assert 0.49 < box.width / box.height < 2.04


def test_distribution_is_torchvisions() -> None:
    draws = 4000
    ours = [RandomResizedCrop().view(seed, 500, 375, SIZE) for seed in range(draws)]
    image = torch.empty(3, 375, 500)
    torch.manual_seed(0)
    theirs = [v2.RandomResizedCrop(224).make_params([image]) for _ in range(draws)]

    def moments(values: list[float]) -> tuple[float, float]:
        column = torch.tensor(values, dtype=torch.float64)
        return float(column.mean()), float(column.std())

    for mine, other in (
        ([view.box.width for view in ours], [each["width"] for each in theirs]),
        ([view.box.height for view in ours], [each["height"] for each in theirs]),
        ([view.box.left for view in ours], [each["left"] for each in theirs]),
        ([view.box.top for view in ours], [each["top"] for each in theirs]),
    ):
        (mean, spread), (their_mean, their_spread) = moments(mine), moments(other)
        assert abs(mean - their_mean) < 5 * spread * math.sqrt(2 / draws)
        assert abs(spread / their_spread - 1) < 0.06
    assert 0.46 < sum(view.mirrored for view in ours) / draws < 0.54


@pytest.mark.parametrize(("width", "height"), [(2000, 20), (20, 2000)])
def test_an_image_too_long_gives_its_middle(width: int, height: int) -> None:
    augment = RandomResizedCrop(scale=(1.0, 1.0))
    box = augment.view(0, width, height, SIZE).box
    params = v2.RandomResizedCrop(224, scale=(1.0, 1.0)).make_params([torch.empty(3, height, width)])
    assert box == (params["left"], params["top"], params["width"], params["height"])


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (333, 501), (224, 224), (100, 90), (641, 257)])
@pytest.mark.parametrize("size", [(224, 224), (97, 64)])
def test_centre_crop_is_resize_and_centre_crop(width: int, height: int, size: tuple[int, int]) -> None:
    view = CentreCrop().view(0, width, height, size)
    image = Image.effect_noise((width, height), 80).convert("RGB")
    short = round(max(size) * 8 / 7)
    expected = v2.functional.pil_to_tensor(v2.CenterCrop(size)(v2.Resize(short)(image)))
    high, wide = view.resized
    resized = v2.functional.pil_to_tensor(image.resize((wide, high), Image.Resampling.BILINEAR))
    (top, left), (rows, columns) = view.inside, view.size
    assert torch.equal(resized[:, top : top + rows, left : left + columns], expected)


@pytest.mark.parametrize(
    "settings", [{"scale": (0, 1)}, {"scale": (0.5, 0.1)}, {"ratio": (2, 1)}, {"mirror": 1.5}, {"scale": (0.1, 2)}]
)
def test_impossible_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(SettingError, match=next(iter(settings))):
        RandomResizedCrop(**settings)  # type: ignore[arg-type]
