"""Images decoded on cards beside those decoded on the host: same views, same order, within what decoders differ by."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

import manycard as mc

pytest.importorskip("torchvision", reason="images need the extra vision")
pytest.importorskip("sklearn", reason="the photographs come with scikit-learn")

from manycard.benchmark.data import make_photographs
from manycard.data.image_files.augment import CentreCrop, RandomResizedCrop
from manycard.data.image_files.backends import BACKENDS, Backend, Inline, make_backend
from manycard.data.image_files.backends.card import Card
from manycard.data.image_files.backends.dali import Dali
from manycard.data.image_files.batched import show_by_products
from manycard.data.image_files.recipe import Recipe, Request
from tests.unit.data.image_files import odd

RECIPES = {"training": Recipe((224, 224), RandomResizedCrop()), "evaluation": Recipe((224, 192), CentreCrop())}
NAMES = ["card", "dali-mixed", "threads", "torchvision"]


@pytest.fixture(scope="module")
def requests_of_all_kinds(tmp_path_factory: pytest.TempPathFactory) -> list[Request]:
    """Photographs, odd kinds, turned ones and a progressive one, mixed."""
    folder = tmp_path_factory.mktemp("images")
    make_photographs(folder / "plain", 64, 110)
    found = sorted(str(path) for path in (folder / "plain").rglob("*.jpg"))
    found += [odd.write(kind, folder)[0] for kind in odd.KINDS]
    found += [odd.write_turned(orientation, folder)[0] for orientation in range(2, 9)]
    return [Request(path, seed) for seed, path in enumerate(found)]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    if request.param.startswith("dali") and Dali.missing():
        pytest.skip("DALI is not installed")
    return str(request.param)


def make(name: str, recipe: Recipe, cards: list[int] | None = None) -> Backend:
    return make_backend(recipe, [], name, 4, cards or [0])


def apart(images: torch.Tensor, others: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Mean difference of each image, in levels of 255."""
    return ((images.float().cpu() - others.float()) / recipe.scale_and_shift()[0]).abs().mean(dim=(1, 2, 3))


@pytest.mark.parametrize("kind", list(RECIPES))
def test_same_images_as_on_the_host(name: str, kind: str, requests_of_all_kinds: list[Request]) -> None:
    recipe = RECIPES[kind]
    expected = Inline(recipe, 1).load(requests_of_all_kinds).images
    backend = make(name, recipe)
    found = backend.load(requests_of_all_kinds)
    backend.close()
    assert found.bad == {}
    assert found.images.device == torch.device("cuda", 0)
    assert found.images.dtype == torch.float32
    difference = apart(found.images, expected, recipe)
    # The cards' decoders fill up chroma without smoothing, so they differ more than those on the host do.
    assert difference.max() < 3.0, list(zip([r.path for r in requests_of_all_kinds], difference.tolist(), strict=True))
    assert difference.mean() < 1.5


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16])
def test_other_dtypes(name: str, dtype: torch.dtype, requests_of_all_kinds: list[Request]) -> None:
    recipe = Recipe((96, 96), RandomResizedCrop(), dtype=dtype)
    whole = Recipe((96, 96), RandomResizedCrop())
    backend = make(name, recipe)
    found = backend.load(requests_of_all_kinds[:8]).images
    backend.close()
    assert found.dtype == dtype
    scale, shift = (each.to(found.device) for each in whole.scale_and_shift())
    values = found.float() * scale + shift if dtype == torch.uint8 else found
    expected = Inline(whole, 1).load(requests_of_all_kinds[:8]).images
    assert apart(values, expected, whole).max() < 3.0


def test_bad_files_are_named(name: str, requests_of_all_kinds: list[Request], tmp_path: Path) -> None:
    data = Path(requests_of_all_kinds[0].path).read_bytes()
    (tmp_path / "cut.jpg").write_bytes(data[:20_000])
    start, scan = data.find(b"\xff\xc4"), data.find(b"\xff\xda")
    (tmp_path / "tables.jpg").write_bytes(data[:start] + data[scan : scan + 5] + b"\x77" + data[scan + 6 :])
    good = requests_of_all_kinds[:3]
    mixed = [good[0], Request(str(tmp_path / "cut.jpg"), 0), good[1], Request(str(tmp_path / "tables.jpg"), 0), good[2]]
    recipe = RECIPES["training"]
    backend = make(name, recipe)
    found = backend.load(mixed)
    assert sorted(found.bad) == [1, 3]
    assert apart(found.images[[0, 2, 4]], Inline(recipe, 1).load(good).images, recipe).max() < 3.0
    assert backend.load(good).bad == {}
    backend.close()


def test_batches_stay_right_while_the_card_works(requests_of_all_kinds: list[Request]) -> None:
    """Memory that training still reads must not be written by the decoder: batches are compared once all are there."""
    recipe = RECIPES["training"]
    backend = make("card", recipe)
    weight = torch.randn(4096, 4096, device="cuda")
    alone = [backend.load(requests_of_all_kinds[first : first + 16]).images.cpu() for first in range(0, 64, 16)]
    found = []
    for first in range(0, 64, 16):
        busy = weight
        for _ in range(20):
            busy = busy @ weight / 64  # allocates and frees while the card lags behind
        images = backend.load(requests_of_all_kinds[first : first + 16]).images
        found.append(images * 1)
        del images, busy
    backend.close()
    for expected, images in zip(alone, found, strict=True):
        torch.testing.assert_close(images.cpu(), expected)


def test_a_batch_that_was_refused_leaves_the_decoder_usable(
    all_cards: list[int], requests_of_all_kinds: list[Request], tmp_path: Path
) -> None:
    data = Path(requests_of_all_kinds[0].path).read_bytes()
    start, scan = data.find(b"\xff\xc4"), data.find(b"\xff\xda")
    (tmp_path / "tables.jpg").write_bytes(data[:start] + data[scan : scan + 5] + b"\x77" + data[scan + 6 :])
    good, bad = requests_of_all_kinds[:32], Request(str(tmp_path / "tables.jpg"), 0)
    backend = make("card", RECIPES["training"], all_cards)
    expected = backend.load(good).images
    for row in (0, 16, 31):
        mixed = [*good[:row], bad, *good[row + 1 :]]
        assert list(backend.load(mixed).bad) == [row]
        assert torch.equal(backend.load(good).images, expected)
    backend.close()
    assert torch.equal(backend.load(good).images, expected)
    backend.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("kind", list(RECIPES))
def test_the_kernel_gives_the_windows_of_the_products(kind: str, dtype: torch.dtype) -> None:
    from manycard.data.image_files.window_kernel import show_by_kernel

    recipe, images, views = dataclasses.replace(RECIPES[kind], dtype=dtype), [], []
    for seed in range(40):
        width, height = (int(side) for side in torch.randint(20, 900, (2,)))
        orientation = 1 + seed % 8
        upright = (width, height) if orientation < 5 else (height, width)
        images.append(torch.randint(0, 256, (3, height, width), dtype=torch.uint8))
        views.append(recipe.augment.view(seed, *upright, recipe.size).in_stored(orientation, *upright))
    expected = show_by_products(images, views, recipe).float()
    found = show_by_kernel([image.cuda() for image in images], views, recipe)
    assert found.dtype == dtype
    # On the kernel's side products are fused with sums, which moves a filter's edge by the last bits of its place.
    allowed = {torch.float32: 2e-3, torch.bfloat16: 0.02, torch.uint8: 1.0}[dtype]
    assert (found.cpu().float() - expected).abs().max() <= allowed


@pytest.mark.parametrize("cards", [1, max(torch.cuda.device_count(), 1)])
def test_batches_decoded_ahead_are_right_while_the_card_works(cards: int, tmp_path: Path) -> None:
    """The decoding threads' streams run beside the training's: neither reads what the other still writes."""
    make_photographs(tmp_path, 96, 50)
    dataset = mc.data.image_folder(tmp_path, 64, augment=True, backend="card", workers=4, cards=list(range(cards)))
    parallel = mc.Parallel("single", cards="0,", seed=5)
    alone = {}
    for images, _ in parallel.loader(dataset, batch_size=8, collate_fn=default_collate_afresh):
        torch.cuda.synchronize()
        alone[len(alone)] = images.cpu()
    weight = torch.randn(4096, 4096, device="cuda")
    found = []
    ahead = mc.Parallel("single", cards="0,", seed=5).loader(dataset, batch_size=8)
    for images, _ in ahead:
        busy = weight
        for _ in range(20):
            busy = busy @ weight / 64
        found.append(images * 1)
        del images, busy
    dataset.close()
    for number, images in enumerate(found):
        torch.testing.assert_close(images.cpu(), alone[number])


def default_collate_afresh(samples: list[Any]) -> Any:
    """PyTorch's collating as a function of the user's, so that nothing is decoded ahead."""
    return default_collate(samples)


def test_a_loader_feeds_all_cards(name: str, tmp_path: Path) -> None:
    """From files to weights, on all cards, as on one."""
    make_photographs(tmp_path, 40, 50)
    weights = []
    for cards in ("0,", "all"):
        parallel = mc.Parallel("dp", cards=cards, seed=5)
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.AvgPool2d(8), torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 10))
        model, optimizer = parallel.setup(net, torch.optim.SGD(net.parameters(), lr=1e-2))
        step = parallel.train_step(
            lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]), model, optimizer
        )
        dataset = mc.data.image_folder(tmp_path, 64, augment=True, backend=name, workers=4, cards=parallel.cards)
        for batch in parallel.loader(dataset, batch_size=12, shuffle=True):
            assert batch[0].device == parallel.device
            step(batch)
        weights.append(net[2].weight.detach().cpu())
        dataset.close()
        parallel.close()
    torch.testing.assert_close(weights[0], weights[1], atol=1e-5, rtol=1e-4)


@pytest.fixture
def all_cards() -> list[int]:
    return list(range(torch.cuda.device_count()))


@pytest.mark.parametrize("kind", ["card", "dali-mixed"])
def test_every_card_makes_its_part(kind: str, all_cards: list[int], requests_of_all_kinds: list[Request]) -> None:
    if kind == "dali-mixed" and Dali.missing():
        pytest.skip("DALI is not installed")
    recipe = RECIPES["training"]
    expected = Inline(recipe, 1).load(requests_of_all_kinds).images
    backend = make(kind, recipe, all_cards)
    for count in (len(requests_of_all_kinds), 1, 7):
        found = backend.load(requests_of_all_kinds[:count]).images
        assert found.device == torch.device("cuda", 0)
        assert apart(found, expected[:count], recipe).max() < 3.0
    backend.close()


def test_auto_tries_the_cards(requests_of_all_kinds: list[Request], capfd: pytest.CaptureFixture[str]) -> None:
    backend = make_backend(RECIPES["training"], requests_of_all_kinds[:64], "auto", 4, [0])
    said = capfd.readouterr().err
    assert backend.name in BACKENDS
    assert Card.name in said
    assert "failed" not in said
    backend.close()
